/* What makes one .cu both a CUDA kernel and a C++ function. Kernels are written for a *block*: its threads take every
 * branch together, one elected thread talks to the host, and all copies go through fl_block_copy.
 *
 * On the emulated GPU a block is one host thread (so it is always elected and barriers are free), and the copy and the
 * pause are calls into the emulator, which charges the scale-up links that the bytes cross. */
#ifndef FUSELINK_SIMT_H
#define FUSELINK_SIMT_H

#include "order.cuh"

#ifdef __CUDACC__

#define FL_KERNEL(name, Params)                           \
  static __device__ void name##_block(Params* p);         \
  extern "C" __global__ void name(Params* p) {            \
    name##_block(p);                                      \
  }                                                       \
  static __device__ void name##_block(Params* p)

FL_FN uint32_t fl_block_idx() { return blockIdx.x; }
FL_FN uint32_t fl_block_count() { return gridDim.x; }
FL_FN bool fl_elected() { return threadIdx.x == 0; }
FL_FN void fl_block_sync() { __syncthreads(); }

/* Every thread gets the elected thread's value. */
FL_FN uint64_t fl_broadcast(uint64_t value) {
  __shared__ uint64_t shared;
  __syncthreads();
  if (fl_elected()) shared = value;
  __syncthreads();
  return shared;
}

/* 16 bytes a thread while both sides allow it; the tail byte by byte. */
FL_FN void fl_block_copy(uint64_t dst, uint64_t src, uint64_t bytes) {
  uint64_t wide = ((dst | src) & 15) == 0 ? bytes / 16 : 0;
  for (uint64_t i = threadIdx.x; i < wide; i += blockDim.x) {
    fl_at<uint4>(dst)[i] = __ldcs(fl_at<const uint4>(src) + i);
  }
  for (uint64_t i = wide * 16 + threadIdx.x; i < bytes; i += blockDim.x) {
    fl_at<uint8_t>(dst)[i] = fl_at<const uint8_t>(src)[i];
  }
}

FL_FN void fl_pause(uint32_t idle_rounds) { __nanosleep(idle_rounds < 8 ? 64 : 512); }

#else

/* The emulated GPU's side of a block; host/emu/gpu.rs mirrors it. */
extern "C" struct FlBlock {
  uint32_t block_idx;
  uint32_t block_count;
  void* world;
  void (*copy)(void* world, uint64_t dst, uint64_t src, uint64_t bytes);
  void (*pause)(void* world, uint32_t idle_rounds);
};

extern thread_local const FlBlock* fl_this_block;

#define FL_KERNEL(name, Params)                                        \
  static void name##_block(Params* p);                                 \
  extern "C" void name(const FlBlock* block, uint64_t params_dev_ptr) { \
    fl_this_block = block;                                             \
    name##_block(fl_at<Params>(params_dev_ptr));                       \
  }                                                                    \
  static void name##_block(Params* p)

FL_FN uint32_t fl_block_idx() { return fl_this_block->block_idx; }
FL_FN uint32_t fl_block_count() { return fl_this_block->block_count; }
FL_FN bool fl_elected() { return true; }
FL_FN void fl_block_sync() {}
FL_FN uint64_t fl_broadcast(uint64_t value) { return value; }
FL_FN void fl_block_copy(uint64_t dst, uint64_t src, uint64_t bytes) {
  fl_this_block->copy(fl_this_block->world, dst, src, bytes);
}
FL_FN void fl_pause(uint32_t idle_rounds) { fl_this_block->pause(fl_this_block->world, idle_rounds); }

#endif

#endif
