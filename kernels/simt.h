/* What makes one .cu both a CUDA kernel and a C++ function. What runs together is a *scope*: a thread, a warp or a
 * block, whose threads take every branch together; one elected thread of it talks to the host, and all copies go
 * through fl_copy. The library's own kernels are written for blocks. Blocks have one dimension, a multiple of 32 threads
 * where a warp is a scope.
 *
 * On the emulated GPU a block is one host thread, hence all three scopes (it is always elected and barriers are free), and
 * the copy and the pause are calls into the emulator, which charges the scale-up links that the bytes cross. */
#ifndef FUSELINK_SIMT_H
#define FUSELINK_SIMT_H

#include "copy.cuh"

struct FlThreadScope {};
struct FlWarpScope {};
struct FlBlockScope {};

#ifdef __CUDACC__

#define FL_KERNEL(name, Params)                           \
  static __device__ void name##_block(Params* p);         \
  extern "C" __global__ void name(Params* p) {            \
    name##_block(p);                                      \
  }                                                       \
  static __device__ void name##_block(Params* p)

/* The same, with registers for so many blocks of so many threads on a multiprocessor. */
#define FL_BOUNDED_KERNEL(name, Params, threads, blocks)                       \
  static __device__ void name##_block(Params* p);                              \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(Params* p) { \
    name##_block(p);                                                           \
  }                                                                            \
  static __device__ void name##_block(Params* p)

FL_FN uint32_t fl_block_idx() { return blockIdx.x; }
FL_FN uint32_t fl_block_count() { return gridDim.x; }
FL_FN uint32_t fl_thread_idx() { return threadIdx.x; }
FL_FN uint32_t fl_thread_count() { return blockDim.x; }
FL_FN uint32_t fl_warp_idx() { return threadIdx.x / 32; }
FL_FN uint32_t fl_warp_count() { return blockDim.x / 32; }

FL_FN bool fl_elected(FlThreadScope) { return true; }
FL_FN bool fl_elected(FlWarpScope) { return (threadIdx.x & 31) == 0; }
FL_FN bool fl_elected(FlBlockScope) { return threadIdx.x == 0; }

FL_FN void fl_sync(FlThreadScope) {}
FL_FN void fl_sync(FlWarpScope) { __syncwarp(); }
FL_FN void fl_sync(FlBlockScope) { __syncthreads(); }

/* Every thread of the scope gets the elected thread's value, and sees what that thread saw before. */
FL_FN uint64_t fl_broadcast(FlThreadScope, uint64_t value) { return value; }
FL_FN uint64_t fl_broadcast(FlWarpScope, uint64_t value) {
  value = __shfl_sync(0xffffffffu, value, 0);
  __syncwarp();
  return value;
}
FL_FN uint64_t fl_broadcast(FlBlockScope, uint64_t value) {
  __shared__ uint64_t shared;
  __syncthreads();
  if (threadIdx.x == 0) shared = value;
  __syncthreads();
  return shared;
}

/* Copies by the whole scope. Source and destination do not overlap. */
FL_FN void fl_copy(FlThreadScope, uint64_t dst, uint64_t src, uint64_t bytes) { fl_copy_lanes(dst, src, bytes, 0, 1); }
FL_FN void fl_copy(FlWarpScope, uint64_t dst, uint64_t src, uint64_t bytes) {
  fl_copy_lanes(dst, src, bytes, threadIdx.x & 31, 32);
}
FL_FN void fl_copy(FlBlockScope, uint64_t dst, uint64_t src, uint64_t bytes) {
  fl_copy_lanes(dst, src, bytes, threadIdx.x, blockDim.x);
}

FL_FN void fl_pause(uint32_t idle_rounds) { __nanosleep(idle_rounds < 8 ? 64 : 512); }

/* What was stored into a slot, or loaded from one, where it lies. A GPU's links need not be told. */
FL_FN void fl_count_stores(uint64_t, uint64_t) {}
FL_FN void fl_count_loads(uint64_t, uint64_t) {}

#define FL_SHARED __shared__ /* memory of the block */

#else

/* The emulated GPU's side of a block; host/emu/gpu.rs mirrors it. */
extern "C" struct FlBlock {
  uint32_t block_idx;
  uint32_t block_count;
  void* world;
  void (*copy)(void* world, uint64_t dst, uint64_t src, uint64_t bytes);
  void (*pause)(void* world, uint32_t idle_rounds);
  void (*count)(void* world, uint64_t dev_ptr, uint64_t bytes, uint32_t stores);
};

extern thread_local const FlBlock* fl_this_block;

#define FL_KERNEL(name, Params)                                        \
  static void name##_block(Params* p);                                 \
  extern "C" void name(const FlBlock* block, uint64_t params_dev_ptr) { \
    fl_this_block = block;                                             \
    name##_block(fl_at<Params>(params_dev_ptr));                       \
  }                                                                    \
  static void name##_block(Params* p)

#define FL_BOUNDED_KERNEL(name, Params, threads, blocks) FL_KERNEL(name, Params)

FL_FN uint32_t fl_block_idx() { return fl_this_block->block_idx; }
FL_FN uint32_t fl_block_count() { return fl_this_block->block_count; }
FL_FN uint32_t fl_thread_idx() { return 0; }
FL_FN uint32_t fl_thread_count() { return 1; }
FL_FN uint32_t fl_warp_idx() { return 0; }
FL_FN uint32_t fl_warp_count() { return 1; }

template <typename Scope>
FL_FN bool fl_elected(Scope) {
  return true;
}

template <typename Scope>
FL_FN void fl_sync(Scope) {}

template <typename Scope>
FL_FN uint64_t fl_broadcast(Scope, uint64_t value) {
  return value;
}

template <typename Scope>
FL_FN void fl_copy(Scope, uint64_t dst, uint64_t src, uint64_t bytes) {
  fl_this_block->copy(fl_this_block->world, dst, src, bytes);
}

FL_FN void fl_pause(uint32_t idle_rounds) { fl_this_block->pause(fl_this_block->world, idle_rounds); }

/* Those of `bytes` that no copy has moved were stored, or loaded, in place: their links are charged for them now. */
FL_FN void fl_count_stores(uint64_t dev_ptr, uint64_t bytes) {
  fl_this_block->count(fl_this_block->world, dev_ptr, bytes, 1);
}
FL_FN void fl_count_loads(uint64_t dev_ptr, uint64_t bytes) {
  fl_this_block->count(fl_this_block->world, dev_ptr, bytes, 0);
}

#define FL_SHARED /* a block is one thread */

#endif

/* The same for the library's own kernels. */
FL_FN bool fl_elected() { return fl_elected(FlBlockScope()); }
FL_FN void fl_block_sync() { fl_sync(FlBlockScope()); }
FL_FN uint64_t fl_broadcast(uint64_t value) { return fl_broadcast(FlBlockScope(), value); }
FL_FN void fl_block_copy(uint64_t dst, uint64_t src, uint64_t bytes) { fl_copy(FlBlockScope(), dst, src, bytes); }

#endif
