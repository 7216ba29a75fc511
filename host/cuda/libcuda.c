/* The driver's calls, each a jump through a table that is filled when the program starts.
 *
 * libcuda.so.1 belongs to the driver, so a machine without one has none. A program that named it as a library it needs
 * would not even start there; this one starts, runs emulated GPUs, and says what is missing when it is asked for real
 * ones. Symbols are hidden: nobody else in the process sees them. A call that the driver is too old to have answers
 * CUDA_ERROR_NOT_SUPPORTED. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

#define HIDDEN __attribute__((visibility("hidden"), used))

enum { STUB_LIBRARY = 34, NOT_SUPPORTED = 801 }; /* CUresult */

HIDDEN int fl_no_driver(void) { return STUB_LIBRARY; }
HIDDEN int fl_no_such_call(void) { return NOT_SUPPORTED; }

/* What cust and rustacuda call, and host/cuda/sys.rs. */
#define CALLS(CALL)                                                                                                   \
  CALL(cuArray3DCreate_v2) CALL(cuArray3DGetDescriptor_v2) CALL(cuArrayDestroy) CALL(cuCtxCreate_v2)                  \
  CALL(cuCtxDestroy_v2) CALL(cuCtxGetApiVersion) CALL(cuCtxGetCacheConfig) CALL(cuCtxGetCurrent)                      \
  CALL(cuCtxGetDevice) CALL(cuCtxGetFlags) CALL(cuCtxGetLimit) CALL(cuCtxGetSharedMemConfig)                          \
  CALL(cuCtxGetStreamPriorityRange) CALL(cuCtxPopCurrent_v2) CALL(cuCtxPushCurrent_v2) CALL(cuCtxSetCacheConfig)      \
  CALL(cuCtxSetCurrent) CALL(cuCtxSetLimit) CALL(cuCtxSetSharedMemConfig) CALL(cuCtxSynchronize)                      \
  CALL(cuDestroyExternalMemory) CALL(cuDeviceCanAccessPeer) CALL(cuDeviceGet) CALL(cuDeviceGetAttribute)              \
  CALL(cuDeviceGetCount) CALL(cuDeviceGetName) CALL(cuDeviceGetPCIBusId) CALL(cuDeviceGetUuid)                        \
  CALL(cuDevicePrimaryCtxRelease_v2) CALL(cuDevicePrimaryCtxReset_v2) CALL(cuDevicePrimaryCtxRetain)                  \
  CALL(cuDevicePrimaryCtxSetFlags_v2) CALL(cuDeviceTotalMem_v2) CALL(cuDriverGetVersion) CALL(cuEventCreate)          \
  CALL(cuEventDestroy_v2) CALL(cuEventElapsedTime) CALL(cuEventQuery) CALL(cuEventRecord) CALL(cuEventSynchronize)    \
  CALL(cuExternalMemoryGetMappedBuffer) CALL(cuFuncGetAttribute) CALL(cuFuncGetParamInfo) CALL(cuFuncLoad)           \
  CALL(cuFuncSetCacheConfig)                                                                                          \
  CALL(cuFuncSetSharedMemConfig) CALL(cuGetErrorName) CALL(cuGetErrorString) CALL(cuGraphAddKernelNode)               \
  CALL(cuGraphCreate) CALL(cuGraphDebugDotPrint) CALL(cuGraphDestroy) CALL(cuGraphGetEdges) CALL(cuGraphGetNodes)     \
  CALL(cuGraphKernelNodeGetParams) CALL(cuGraphNodeGetType) CALL(cuImportExternalMemory) CALL(cuInit)                 \
  CALL(cuLaunchHostFunc) CALL(cuLaunchKernel) CALL(cuLinkAddData_v2) CALL(cuLinkComplete) CALL(cuLinkCreate_v2)       \
  CALL(cuLinkDestroy) CALL(cuMemAddressFree) CALL(cuMemAddressReserve) CALL(cuMemAdvise) CALL(cuMemAllocAsync)        \
  CALL(cuMemAllocHost_v2) CALL(cuMemAllocManaged) CALL(cuMemAlloc_v2) CALL(cuMemCreate)                               \
  CALL(cuMemExportToShareableHandle) CALL(cuMemFreeAsync) CALL(cuMemFreeHost) CALL(cuMemFree_v2)                      \
  CALL(cuMemGetAllocationGranularity) CALL(cuMemGetAllocationPropertiesFromHandle)                                    \
  CALL(cuMemGetHandleForAddressRange) CALL(cuMemGetInfo_v2) CALL(cuMemHostGetDevicePointer_v2)                        \
  CALL(cuMemHostRegister_v2) CALL(cuMemHostUnregister) CALL(cuMemImportFromShareableHandle) CALL(cuMemMap)            \
  CALL(cuMemPrefetchAsync) CALL(cuMemRelease) CALL(cuMemSetAccess) CALL(cuMemUnmap) CALL(cuMemcpy2D_v2)               \
  CALL(cuMemcpyAtoH_v2) CALL(cuMemcpyDtoDAsync_v2) CALL(cuMemcpyDtoD_v2) CALL(cuMemcpyDtoHAsync_v2)                   \
  CALL(cuMemcpyDtoH_v2) CALL(cuMemcpyHtoA_v2) CALL(cuMemcpyHtoDAsync_v2) CALL(cuMemcpyHtoD_v2)                        \
  CALL(cuMemsetD16Async) CALL(cuMemsetD16_v2) CALL(cuMemsetD32Async) CALL(cuMemsetD32_v2) CALL(cuMemsetD8Async)       \
  CALL(cuMemsetD8_v2) CALL(cuModuleGetFunction) CALL(cuModuleGetGlobal_v2) CALL(cuModuleLoad)                         \
  CALL(cuModuleLoadData) CALL(cuModuleLoadDataEx) CALL(cuModuleUnload) CALL(cuOccupancyAvailableDynamicSMemPerBlock)  \
  CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor) CALL(cuOccupancyMaxPotentialBlockSize)                            \
  CALL(cuPointerGetAttribute) CALL(cuStreamAddCallback) CALL(cuStreamCreate) CALL(cuStreamCreateWithPriority)         \
  CALL(cuStreamDestroy_v2) CALL(cuStreamGetFlags) CALL(cuStreamGetPriority) CALL(cuStreamIsCapturing)                 \
  CALL(cuStreamQuery)                                                                                                 \
  CALL(cuStreamSynchronize) CALL(cuStreamWaitEvent) CALL(cuSurfObjectCreate) CALL(cuSurfObjectDestroy)                \
  CALL(cuSurfObjectGetResourceDesc) CALL(cuTexObjectCreate) CALL(cuTexObjectDestroy)                                  \
  CALL(cuTexObjectGetResourceDesc) CALL(cuTexObjectGetResourceViewDesc) CALL(cuThreadExchangeStreamCaptureMode)

#if defined(__x86_64__)
#define JUMP(slot) "jmp *" slot "(%rip)\n"
#elif defined(__aarch64__)
#define JUMP(slot) "adrp x16, " slot "\nldr x16, [x16, :lo12:" slot "]\nbr x16\n"
#else
#error "the CUDA backend is for x86-64 and arm64"
#endif

/* x16 and the flags are free at a call, and every argument stays where it is. */
#define CALL(name)                                       \
  HIDDEN void* fl_slot_##name = (void*)fl_no_driver;     \
  __asm__(".text\n.globl " #name "\n.hidden " #name "\n" \
          ".type " #name ", %function\n" #name ":\n" JUMP("fl_slot_" #name));
CALLS(CALL)
#undef CALL

static const struct {
  const char* name;
  void** slot;
} calls[] = {
#define CALL(name) {#name, &fl_slot_##name},
    CALLS(CALL)
#undef CALL
};

static char why_not[256];

/* Before main, as the loader would have done it: programs may call the driver before they call this library. */
__attribute__((constructor)) static void load_driver(void) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == NULL) {
    const char* why = dlerror(); /* valid until the next call of the loader */
    snprintf(why_not, sizeof why_not, "%s", why != NULL ? why : "libcuda.so.1 cannot be loaded");
    return;
  }
  for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); ++i) {
    void* call = dlsym(driver, calls[i].name);
    *calls[i].slot = call != NULL ? call : (void*)fl_no_such_call;
  }
}

/* Why the driver could not be loaded; null when it was. */
HIDDEN const char* fl_why_no_driver(void) { return why_not[0] != 0 ? why_not : NULL; }
