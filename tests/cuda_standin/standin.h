/* A libcuda.so.1 for machines without a GPU: memory is memfd and mmap, kernels are the .cu files of kernels/ built as C++.
 *
 * It is stricter than it is complete: it has the calls that the library and its tests make, and it enforces the rules of
 * the real driver, each under a name. FL_STANDIN_WITHOUT=name,name switches rules off, so that tests can show that they
 * would notice. Settings make other machines of it: FL_STANDIN_GPUS (2), FL_STANDIN_PEERS (1), FL_STANDIN_DRIVER (13000),
 * FL_STANDIN_LACKS (an attribute's number), FL_STANDIN_MULTIPROCESSORS (16), FL_STANDIN_OCCUPANCY (2: blocks on each of them);
 * and other kernels: FL_STANDIN_PARAMETERS (1), FL_STANDIN_BLOCK_THREADS (1024: at most). */
#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace standin {

constexpr size_t kGranularity = 2 << 20;
constexpr size_t kPage = 4096;

/* Whether a rule is enforced. */
bool on(const char* rule);
/* Enforces a rule: when it is broken and on, says so and makes the call fail with `code`. */
bool breaks(bool broken, const char* rule, const char* what);
/* A number from the environment. */
int setting(const char* name, int otherwise);
int gpus();

/* Everything below is under this lock. */
extern std::recursive_mutex& lock;
using Guard = std::lock_guard<std::recursive_mutex>;

/* ---- contexts ---- */

struct Context {
  int device;
  CUresult fault = CUDA_SUCCESS; /* sticky: a kernel has touched what it must not */
};

/* The calling thread's context; the answer of a call when there is none or it is broken. */
CUresult enter(Context** context);
#define ENTER(context)                                                      \
  standin::Guard guard(standin::lock);                                      \
  standin::Context* context = nullptr;                                      \
  if (CUresult code = standin::enter(&context); code != CUDA_SUCCESS) return code; \
  (void)context

/* ---- capture ---- */

/* Refuses a call that a capture would not see, where the thread's mode and the captures under way say so; spoils those. */
CUresult may_escape_capture(const char* call);
#define ESCAPES_CAPTURE(call) \
  if (CUresult code = standin::may_escape_capture(call); code != CUDA_SUCCESS) return code

/* ---- memory ---- */

/* Whether a device may touch these bytes: mapped, with access; or host memory that is mapped into it. */
bool accessible(int device, uint64_t address, uint64_t bytes);
/* Whether these bytes of the host are pinned. */
bool pinned(const void* host_ptr, size_t bytes);

/* ---- work ---- */

/* Whether kernels that have been launched on a device have not ended. */
bool kernels_run(int device);
/* Refuses a call that waits for the device while kernels wait for the host. */
CUresult may_wait(const char* rule, int device, const char* call);
#define MAY_WAIT_BY(rule, device, call) \
  if (CUresult code = standin::may_wait(rule, device, call); code != CUDA_SUCCESS) return code
#define MAY_WAIT(device, call) MAY_WAIT_BY("wait-for-kernels", device, call); ESCAPES_CAPTURE(call)

}  // namespace standin
