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
