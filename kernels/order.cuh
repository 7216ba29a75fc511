/* Memory order and scopes: the only PTX and the only atomics of the kernels. docs/memory-model.md says who pairs with
 * whom. "sys" reaches the host, NICs and other GPUs; "gpu" reaches the other blocks of this GPU.
 *
 * The host branch is the same contract on the CPU's coherent memory, so that the emulated GPU runs the same sources. */
#ifndef FUSELINK_ORDER_CUH
#define FUSELINK_ORDER_CUH

#include "abi.h"

#ifdef __CUDACC__

#define FL_FN static __device__ __forceinline__
#define FL_ROLLED _Pragma("unroll 1") /* a rare loop: its copies would cost registers */

FL_FN uint64_t fl_load_relaxed_sys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

FL_FN void fl_store_relaxed_sys(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(p), "l"(v) : "memory");
}

FL_FN void fl_store_release_sys(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(p), "l"(v) : "memory");
}

FL_FN void fl_fence_sys() { asm volatile("fence.acq_rel.sys;" : : : "memory"); }

FL_FN uint64_t fl_load_relaxed_gpu(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

FL_FN void fl_store_relaxed_gpu(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" : : "l"(p), "l"(v) : "memory");
}

FL_FN uint64_t fl_load_acquire_gpu(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

FL_FN uint64_t fl_add_acq_rel_gpu(uint64_t* p, uint64_t v) {
  uint64_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}

FL_FN bool fl_cas_acq_rel_gpu(uint64_t* p, uint64_t expected, uint64_t desired) {
  uint64_t old;
  asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(p), "l"(expected), "l"(desired)
               : "memory");
  return old == expected;
}

FL_FN bool fl_cas_relaxed_sys(uint64_t* p, uint64_t expected, uint64_t desired) {
  uint64_t old;
  asm volatile("atom.relaxed.sys.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(p), "l"(expected), "l"(desired)
               : "memory");
  return old == expected;
}

FL_FN void fl_add_release_sys(uint64_t* p, uint64_t v) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" : : "l"(p), "l"(v) : "memory");
}

FL_FN uint64_t fl_exchange_release_sys(uint64_t* p, uint64_t v) {
  uint64_t old;
  asm volatile("atom.release.sys.global.exch.b64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}

FL_FN uint64_t fl_now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t) : : "memory");
  return t;
}

/* Payload: weak accesses of one thread, which a barrier and a fence order. */

struct __align__(16) FlWide {
  uint32_t w[4];
};

FL_FN FlWide fl_load_wide(uint64_t dev_ptr) {
  uint4 v = __ldcs(reinterpret_cast<const uint4*>(dev_ptr));
  return FlWide{{v.x, v.y, v.z, v.w}};
}

FL_FN void fl_store_wide(uint64_t dev_ptr, FlWide v) {
  *reinterpret_cast<uint4*>(dev_ptr) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
}

FL_FN uint32_t fl_load_word(uint64_t dev_ptr) { return *reinterpret_cast<const uint32_t*>(dev_ptr); }

/* The 32 bits from bit `shift` on (0 to 31) of high:low. */
FL_FN uint32_t fl_funnel(uint32_t low, uint32_t high, uint32_t shift) { return __funnelshift_r(low, high, shift); }

/* The bulk copy engine (TMA, compute capability 9.0 and later), whose accesses neither barriers nor the fences above order.
 * Addresses and sizes are multiples of 16. Before 9.0 there is none: the calling thread copies, by ordinary accesses, and
 * there is nothing to fence or to wait for. bulk.cuh is what kernels call. */

FL_FN void fl_copy_wide(uint64_t dst, uint64_t src, uint32_t bytes) {
  FL_ROLLED
  for (uint32_t i = 0; i < bytes; i += 16) {
    *reinterpret_cast<uint4*>(dst + i) = *reinterpret_cast<const uint4*>(src + i);
  }
}

FL_FN uint32_t fl_shared_addr(const void* shared) { return (uint32_t)__cvta_generic_to_shared(shared); }

/* Ordinary accesses of this thread, and what it has acquired, against accesses of the engine, both ways. */
FL_FN void fl_fence_engine() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async;" : : : "memory");
#endif
}

/* Starts a copy from shared memory to memory of any GPU of the server. */
FL_FN void fl_engine_store(uint64_t dst, const void* shared, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :
               : "l"(dst), "r"(fl_shared_addr(shared)), "r"(bytes)
               : "memory");
#else
  fl_copy_wide(dst, reinterpret_cast<uint64_t>(shared), bytes);
#endif
}

/* Waits until the copies that this thread has started have been written, not merely read (`.read`). */
FL_FN void fl_engine_finish() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group 0;" : : : "memory");
#endif
}

/* A barrier in shared memory on which copies to shared memory end. */
FL_FN void fl_engine_barrier_init(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(fl_shared_addr(barrier)) : "memory");
#else
  *barrier = 0;
#endif
}

/* Starts a copy to shared memory; the barrier's phase ends when it is there. */
FL_FN void fl_engine_load(uint64_t* barrier, void* shared, uint64_t src, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  uint32_t at = fl_shared_addr(barrier);
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n\t}"
               :
               : "r"(at), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(fl_shared_addr(shared)), "l"(src), "r"(bytes), "r"(at)
               : "memory");
#else
  fl_copy_wide(reinterpret_cast<uint64_t>(shared), src, bytes);
#endif
}

/* Whether phase `parity` of the barrier has ended; waits a little. */
FL_FN bool fl_engine_is_loaded(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t ended;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(ended)
      : "r"(fl_shared_addr(barrier)), "r"(parity)
      : "memory");
  return ended != 0;
#else
  return true;
#endif
}

#else

#include <string.h>
#include <time.h>

#define FL_FN static inline
#define FL_ROLLED

FL_FN uint64_t fl_load_relaxed_sys(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
FL_FN void fl_store_relaxed_sys(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
FL_FN void fl_store_release_sys(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
#ifdef __SANITIZE_THREAD__
/* The thread sanitizer follows no fences. A read-modify-write of one word that all fences share orders what they order,
 * and more: every fence after this one. So a race it reports is one, and a missing fence is still missed. */
static uint64_t fl_fences;
FL_FN void fl_fence_sys() { __atomic_fetch_add(&fl_fences, 1, __ATOMIC_ACQ_REL); }
#else
FL_FN void fl_fence_sys() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
#endif
FL_FN uint64_t fl_load_relaxed_gpu(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
FL_FN void fl_store_relaxed_gpu(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
FL_FN uint64_t fl_load_acquire_gpu(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
FL_FN uint64_t fl_add_acq_rel_gpu(uint64_t* p, uint64_t v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
FL_FN bool fl_cas_acq_rel_gpu(uint64_t* p, uint64_t expected, uint64_t desired) {
  return __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}
FL_FN bool fl_cas_relaxed_sys(uint64_t* p, uint64_t expected, uint64_t desired) {
  return __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

FL_FN void fl_add_release_sys(uint64_t* p, uint64_t v) { __atomic_fetch_add(p, v, __ATOMIC_RELEASE); }
FL_FN uint64_t fl_exchange_release_sys(uint64_t* p, uint64_t v) { return __atomic_exchange_n(p, v, __ATOMIC_RELEASE); }

struct alignas(16) FlWide {
  uint32_t w[4];
};

FL_FN FlWide fl_load_wide(uint64_t dev_ptr) {
  FlWide v;
  memcpy(&v, reinterpret_cast<const void*>(dev_ptr), sizeof v);
  return v;
}

FL_FN void fl_store_wide(uint64_t dev_ptr, FlWide v) { memcpy(reinterpret_cast<void*>(dev_ptr), &v, sizeof v); }

FL_FN uint32_t fl_load_word(uint64_t dev_ptr) {
  uint32_t v;
  memcpy(&v, reinterpret_cast<const void*>(dev_ptr), sizeof v);
  return v;
}

FL_FN uint32_t fl_funnel(uint32_t low, uint32_t high, uint32_t shift) {
  return (uint32_t)(((uint64_t)high << 32 | low) >> shift);
}

/* A bulk copy is one of the calling thread, done at once. */
FL_FN void fl_fence_engine() {}
FL_FN void fl_engine_store(uint64_t dst, const void* shared, uint32_t bytes) {
  memcpy(reinterpret_cast<void*>(dst), shared, bytes);
}
FL_FN void fl_engine_finish() {}
FL_FN void fl_engine_barrier_init(uint64_t* barrier) { *barrier = 0; }
FL_FN void fl_engine_load(uint64_t*, void* shared, uint64_t src, uint32_t bytes) {
  memcpy(shared, reinterpret_cast<const void*>(src), bytes);
}
FL_FN bool fl_engine_is_loaded(uint64_t*, uint32_t) { return true; }

FL_FN uint64_t fl_now_ns() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#endif

/* A device address as a pointer. */
template <typename T>
FL_FN T* fl_at(uint64_t dev_ptr) {
  return reinterpret_cast<T*>(dev_ptr);
}

#endif
