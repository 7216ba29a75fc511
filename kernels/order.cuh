/* Memory order and scopes: the only PTX and the only atomics of the kernels. docs/memory-model.md says who pairs with
 * whom. "sys" reaches the host, NICs and other GPUs; "gpu" reaches the other blocks of this GPU.
 *
 * The host branch is the same contract on the CPU's coherent memory, so that the emulated GPU runs the same sources. */
#ifndef FUSELINK_ORDER_CUH
#define FUSELINK_ORDER_CUH

#include "abi.h"

#ifdef __CUDACC__

#define FL_FN static __device__ __forceinline__

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

FL_FN uint64_t fl_add_acq_rel_gpu(uint64_t* p, uint64_t v) {
  uint64_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}

FL_FN bool fl_cas_relaxed_gpu(uint64_t* p, uint64_t expected, uint64_t desired) {
  uint64_t old;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
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

#else

#include <time.h>

#define FL_FN static inline

FL_FN uint64_t fl_load_relaxed_sys(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
FL_FN void fl_store_relaxed_sys(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
FL_FN void fl_store_release_sys(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
FL_FN void fl_fence_sys() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
FL_FN uint64_t fl_load_relaxed_gpu(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
FL_FN void fl_store_relaxed_gpu(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
FL_FN uint64_t fl_add_acq_rel_gpu(uint64_t* p, uint64_t v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
FL_FN bool fl_cas_relaxed_gpu(uint64_t* p, uint64_t expected, uint64_t desired) {
  return __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
FL_FN bool fl_cas_relaxed_sys(uint64_t* p, uint64_t expected, uint64_t desired) {
  return fl_cas_relaxed_gpu(p, expected, desired);
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
