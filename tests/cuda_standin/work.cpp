/* Streams: each a thread that does what is queued, in order. A kernel's blocks run on a few threads at once. */
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>

#include "../../kernels/simt.h"
#include "streams.h"

void* standin_entry(CUfunction function, bool* loads);

namespace standin {

std::set<Stream*>& streams = *new std::set<Stream*>;

namespace {

/* Never destroyed: threads of kernels may outlive main. */
auto& changed = *new std::condition_variable_any;

void serve(Stream* stream) {
  lock.lock();
  for (;;) {
    while (stream->queue.empty() && !stream->stop) changed.wait(lock);
    if (stream->queue.empty()) break;
    auto run = stream->queue.front().run;
    lock.unlock();
    run();
    lock.lock();
    stream->queue.pop_front();
    changed.notify_all();
  }
  streams.erase(stream);
  lock.unlock();
  stream->thread.detach();
  delete stream;
}

bool has_kernel(const Stream* stream) {
  return std::any_of(stream->queue.begin(), stream->queue.end(), [](const Work& w) { return w.kernel; });
}

/* ---- kernels ---- */

struct Grid {
  void (*entry)(const FlBlock*, uint64_t);
  uint64_t params;
  uint32_t blocks;
  Context* context;
  std::atomic<uint32_t> next{0};
};

/* Whether the grid's GPU may touch the memory; if not, that is its fault. */
bool touch(Grid* grid, uint64_t at, uint64_t bytes) {
  Guard guard(lock);
  bool may = accessible(grid->context->device, at, bytes);
  if (!may) grid->context->fault = CUDA_ERROR_ILLEGAL_ADDRESS;
  return may;
}

void copy(void* world, uint64_t dst, uint64_t src, uint64_t bytes) {
  auto* grid = (Grid*)world;
  if (touch(grid, dst, bytes) && touch(grid, src, bytes)) memcpy((void*)dst, (const void*)src, bytes);
}

/* What was stored or loaded in place. */
void count(void* world, uint64_t at, uint64_t bytes, uint32_t) { touch((Grid*)world, at, bytes); }

void pause(void*, uint32_t idle_rounds) { usleep(std::min<uint32_t>(1000, 50 * idle_rounds)); }

void run_blocks(Grid* grid) {
  for (uint32_t i; (i = grid->next++) < grid->blocks;) {
    FlBlock block = {i, grid->blocks, grid, copy, pause, count};
    grid->entry(&block, grid->params);
  }
}

void run_grid(Grid* grid) {
  std::vector<std::thread> resident;
  for (int i = 0; i < setting("FL_STANDIN_RESIDENT", 2); ++i) resident.emplace_back(run_blocks, grid);
  for (auto& thread : resident) thread.join();
}

/* ---- queueing ---- */

/* A copy that its host memory lets run beside kernels. */
CUresult check_copy(Context* context, CUdeviceptr device_ptr, const void* host_ptr, size_t bytes) {
  if (!accessible(context->device, device_ptr, bytes)) {
    breaks(true, "access-before-use", "a copy of memory without access");
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!pinned(host_ptr, bytes)) MAY_WAIT_BY("pinned-copies", context->device, "a copy of memory that is not pinned");
  return CUDA_SUCCESS;
}

/* The default stream: waits for all streams that are not made to ignore it. */
CUresult default_stream(Context* context, const char* call) {
  for (auto* stream : streams) {
    bool captured = stream->device == context->device && stream->blocking && stream->capture != nullptr;
    if (breaks(captured, "capture-implicit", call)) {
      stream->capture->spoiled = true;
      return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    bool waits = stream->device == context->device && stream->blocking && has_kernel(stream);
    if (waits) MAY_WAIT_BY("wait-for-kernels", context->device, call);
  }
  return CUDA_SUCCESS;
}

}  // namespace

Stream* stream_of(CUstream stream) {
  auto* found = (Stream*)stream;
  return streams.count(found) == 0 ? nullptr : found;
}

CUresult queue(CUstream stream, Work work) {
  auto* to = stream_of(stream);
  if (to == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (to->capture != nullptr) {
    to->capture->nodes.push_back(std::move(work));
    return CUDA_SUCCESS;
  }
  to->queue.push_back(std::move(work));
  changed.notify_all();
  return CUDA_SUCCESS;
}

bool kernels_run(int device) {
  return std::any_of(streams.begin(), streams.end(), [&](Stream* s) { return s->device == device && has_kernel(s); });
}

CUresult may_wait(const char* rule, int device, const char* call) {
  return breaks(kernels_run(device), rule, call) ? CUDA_ERROR_ILLEGAL_STATE : CUDA_SUCCESS;
}

}  // namespace standin

using namespace standin;

extern "C" {

static CUresult create(CUstream* stream, unsigned int flags) {
  ENTER(context);
  auto* fresh = new Stream{context->device, (flags & CU_STREAM_NON_BLOCKING) == 0, {}, false, {}, nullptr};
  streams.insert(fresh);
  fresh->thread = std::thread(serve, fresh);
  *stream = (CUstream)fresh;
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* stream, unsigned int flags) { return create(stream, flags); }
CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int) { return create(stream, flags); }

CUresult cuStreamDestroy_v2(CUstream handle) {
  ENTER(context);
  auto* stream = stream_of(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  stream->stop = true;
  changed.notify_all();
  return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream handle) {
  ENTER(context);
  auto* stream = stream_of(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult code = may_ask(stream, "cuStreamQuery"); code != CUDA_SUCCESS) return code;
  ESCAPES_CAPTURE("cuStreamQuery");
  return stream->queue.empty() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamSynchronize(CUstream handle) {
  ENTER(context);
  auto* stream = stream_of(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult code = may_ask(stream, "cuStreamSynchronize"); code != CUDA_SUCCESS) return code;
  if (has_kernel(stream)) MAY_WAIT_BY("wait-for-kernels", context->device, "cuStreamSynchronize");
  ESCAPES_CAPTURE("cuStreamSynchronize");
  while (!stream->queue.empty() && !has_kernel(stream)) changed.wait(lock);
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
  ENTER(context);
  MAY_WAIT(context->device, "cuCtxSynchronize");
  return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void* src, size_t bytes, CUstream stream) {
  ENTER(context);
  if (CUresult code = check_copy(context, dst, src, bytes); code != CUDA_SUCCESS) return code;
  return queue(stream, Work{false, [=] { memcpy((void*)dst, src, bytes); }});
}

CUresult cuMemcpyDtoHAsync_v2(void* dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  ENTER(context);
  if (CUresult code = check_copy(context, src, dst, bytes); code != CUDA_SUCCESS) return code;
  return queue(stream, Work{false, [=] { memcpy(dst, (const void*)src, bytes); }});
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  ENTER(context);
  if (!accessible(context->device, dst, bytes) || !accessible(context->device, src, bytes)) return CUDA_ERROR_INVALID_VALUE;
  return queue(stream, Work{false, [=] { memcpy((void*)dst, (const void*)src, bytes); }});
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream) {
  ENTER(context);
  if (!accessible(context->device, dst, bytes)) return CUDA_ERROR_INVALID_VALUE;
  return queue(stream, Work{false, [=] { memset((void*)dst, value, bytes); }});
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void* src, size_t bytes) {
  ENTER(context);
  if (CUresult code = default_stream(context, "cuMemcpyHtoD"); code != CUDA_SUCCESS) return code;
  if (!accessible(context->device, dst, bytes)) return CUDA_ERROR_INVALID_VALUE;
  memcpy((void*)dst, src, bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoH_v2(void* dst, CUdeviceptr src, size_t bytes) {
  ENTER(context);
  if (CUresult code = default_stream(context, "cuMemcpyDtoH"); code != CUDA_SUCCESS) return code;
  if (!accessible(context->device, src, bytes)) return CUDA_ERROR_INVALID_VALUE;
  memcpy(dst, (const void*)src, bytes);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned int blocks, unsigned int y, unsigned int z, unsigned int threads,
                        unsigned int threads_y, unsigned int threads_z, unsigned int, CUstream stream, void** params, void**) {
  ENTER(context);
  bool bad = blocks == 0 || y == 0 || z == 0 || threads == 0 || threads * threads_y * threads_z > 1024;
  if (breaks(bad, "launch-shape", "a grid or block of no or too many threads")) return CUDA_ERROR_INVALID_VALUE;
  bool loads = false;
  void* entry = standin_entry(function, &loads);
  if (loads) MAY_WAIT_BY("load-ahead", context->device, "the first launch of a kernel that was not loaded ahead");
  auto kernel = (void (*)(const FlBlock*, uint64_t))entry;
  uint64_t params_at = *(uint64_t*)params[0];
  uint32_t all = blocks * y * z;
  return queue(stream, Work{true, [=] {
                              Grid grid = {kernel, params_at, all, context};
                              run_grid(&grid);
                            }});
}

}  // extern "C"
