/* Devices, contexts, errors, modules. */
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <vector>

#include "standin.h"

namespace standin {

std::recursive_mutex& lock = *new std::recursive_mutex;

namespace {
bool started = false;
/* Never destroyed: threads of kernels may outlive main. */
auto& primary = *new std::map<int, Context>;
auto& made = *new std::map<Context*, std::unique_ptr<Context>>;
thread_local std::vector<Context*> stack;

struct Function {
  void* entry;
  bool loaded;
};
auto& functions = *new std::map<std::pair<CUmodule, std::string>, Function>; /* a CUfunction is a node: their addresses stay */
uintptr_t modules = 0;

/* The start of a fatbin or cubin, or PTX to its end. */
bool is_image(const void* image) {
  uint32_t magic;
  memcpy(&magic, image, sizeof magic);
  if (magic == 0xba55ed50 || memcmp(image, "\x7f" "ELF", 4) == 0) return true;
  bool text = memchr(image, 0, sizeof magic) == nullptr;
  return text && strstr((const char*)image, ".version") != nullptr;
}

/* As kernels in this tree are named: any image has them all. */
bool is_kernel(const char* name) {
  for (const char* start : {"fl_", "test_", "tutorial_"}) {
    if (strncmp(name, start, strlen(start)) == 0) return true;
  }
  return false;
}
}  // namespace

bool on(const char* rule) {
  const char* without = getenv("FL_STANDIN_WITHOUT");
  return without == nullptr || (std::string(",") + without + ",").find(std::string(",") + rule + ",") == std::string::npos;
}

bool breaks(bool broken, const char* rule, const char* what) {
  if (!broken || !on(rule)) return false;
  fprintf(stderr, "libcuda stand-in: %s: %s\n", rule, what);
  return true;
}

int setting(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value == nullptr ? otherwise : atoi(value);
}

int gpus() { return setting("FL_STANDIN_GPUS", 2); }

CUresult enter(Context** context) {
  if (breaks(!started, "init", "a call before cuInit")) return CUDA_ERROR_NOT_INITIALIZED;
  if (breaks(stack.empty(), "context", "a call without a current context")) return CUDA_ERROR_INVALID_CONTEXT;
  *context = stack.empty() ? &primary[0] : stack.back();
  return (*context)->fault;
}

}  // namespace standin

using namespace standin;

extern "C" {

CUresult cuInit(unsigned int flags) {
  Guard guard(lock);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (gpus() == 0) return CUDA_ERROR_NO_DEVICE;
  started = true;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  *version = setting("FL_STANDIN_DRIVER", 13000);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult code, const char** name) {
  switch (code) {
#define NAME(code) \
  case code: *name = #code; return CUDA_SUCCESS
    NAME(CUDA_ERROR_INVALID_VALUE);
    NAME(CUDA_ERROR_OUT_OF_MEMORY);
    NAME(CUDA_ERROR_NOT_INITIALIZED);
    NAME(CUDA_ERROR_NO_DEVICE);
    NAME(CUDA_ERROR_INVALID_DEVICE);
    NAME(CUDA_ERROR_INVALID_IMAGE);
    NAME(CUDA_ERROR_INVALID_CONTEXT);
    NAME(CUDA_ERROR_INVALID_HANDLE);
    NAME(CUDA_ERROR_ILLEGAL_STATE);
    NAME(CUDA_ERROR_ILLEGAL_ADDRESS);
    NAME(CUDA_ERROR_NOT_FOUND);
    NAME(CUDA_ERROR_NOT_READY);
    NAME(CUDA_ERROR_NOT_SUPPORTED);
#undef NAME
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "said by the stand-in";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  *count = gpus();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (breaks(ordinal < 0 || ordinal >= gpus(), "ordinal", "a device that does not exist")) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int bytes, CUdevice) {
  snprintf(name, bytes, "stand-in");
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (device < 0 || device >= gpus()) return CUDA_ERROR_INVALID_DEVICE;
  bool count = attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
  *value = count ? setting("FL_STANDIN_MULTIPROCESSORS", 16) : attribute != setting("FL_STANDIN_LACKS", 0);
  return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  if (device == peer) return CUDA_ERROR_INVALID_DEVICE;
  *can = setting("FL_STANDIN_PEERS", 1);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  Guard guard(lock);
  if (breaks(!started, "init", "a context before cuInit")) return CUDA_ERROR_NOT_INITIALIZED;
  auto [found, fresh] = primary.try_emplace(device);
  if (fresh) found->second.device = device;
  *context = (CUcontext)&found->second;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }

CUresult cuCtxCreate_v2(CUcontext* context, unsigned int, CUdevice device) {
  Guard guard(lock);
  auto fresh = std::make_unique<Context>(Context{device});
  *context = (CUcontext)fresh.get();
  stack.push_back(fresh.get());
  made[fresh.get()] = std::move(fresh);
  return CUDA_SUCCESS;
}

CUresult cuCtxDestroy_v2(CUcontext context) {
  Guard guard(lock);
  if (!stack.empty() && stack.back() == (Context*)context) stack.pop_back();
  made.erase((Context*)context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  stack.push_back((Context*)context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = (CUcontext)stack.back();
  stack.pop_back();
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  if (!stack.empty()) stack.pop_back();
  if (context != nullptr) stack.push_back((Context*)context);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = stack.empty() ? nullptr : (CUcontext)stack.back();
  return CUDA_SUCCESS;
}

#undef cuCtxGetDevice
CUresult cuCtxGetDevice(CUdevice* device) {
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *device = stack.back()->device;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int, CUjit_option*, void**) {
  ENTER(context);
  MAY_WAIT(context->device, "cuModuleLoadDataEx");
  if (breaks(!is_image(image), "image", "an image that is no fatbin, cubin or PTX")) return CUDA_ERROR_INVALID_IMAGE;
  *module = (CUmodule)++modules;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule) {
  ENTER(context);
  MAY_WAIT(context->device, "cuModuleUnload");
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  ENTER(context);
  static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void* entry = is_kernel(name) && self != nullptr ? dlsym(self, name) : nullptr;
  if (entry == nullptr) return CUDA_ERROR_NOT_FOUND;
  auto& found = *functions.try_emplace({module, name}, Function{entry, false}).first;
  *function = (CUfunction)&found.second;
  return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction function) {
  ENTER(context);
  auto* f = (Function*)function;
  if (!f->loaded) MAY_WAIT_BY("wait-for-kernels", context->device, "cuFuncLoad");
  f->loaded = true;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction, size_t index, size_t* offset, size_t* bytes) {
  ENTER(context);
  if (index >= (size_t)setting("FL_STANDIN_PARAMETERS", 1)) return CUDA_ERROR_INVALID_VALUE;
  *offset = 8 * index;
  *bytes = 8;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  ENTER(context);
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? setting("FL_STANDIN_BLOCK_THREADS", 1024) : 0;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int threads, size_t) {
  ENTER(context);
  if (threads <= 0 || threads > 1024) return CUDA_ERROR_INVALID_VALUE;
  *blocks = setting("FL_STANDIN_OCCUPANCY", 2);
  return CUDA_SUCCESS;
}

}  // extern "C"

/* For work.cpp: the code of a kernel, and whether launching it has to load it first. */
void* standin_entry(CUfunction function, bool* loads) {
  auto* f = (Function*)function;
  *loads = !f->loaded;
  f->loaded = true;
  return f->entry;
}
