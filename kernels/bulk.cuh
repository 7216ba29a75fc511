/* Bulk copies (cp.async.bulk, TMA) between shared memory and slots, for kernels that make or use up a tile there.
 *
 *     fl_bulk_store(block, slot.addr, tile, bytes);          FlBulkLoad load = fl_bulk_loader(block, &barrier);
 *     ...                                                    fl_bulk_load(block, &load, tile, message.addr, bytes);
 *     fl_bulk_finish(block);                                 ...
 *     fl_send(block, stream, dst, slot, bytes);              fl_bulk_await(block, &load);
 *
 * The engine's accesses are ordered neither by barriers nor by the fences of fl_send and fl_wait_message; these calls make the
 * fences that it takes (docs/memory-model.md). Addresses and sizes are multiples of 16: slots are aligned to 64.
 *
 * Where there is no engine (compute capability 8.0, the emulated GPU) the elected thread copies by ordinary accesses, so one
 * source serves all; fl_copy is then the faster way. On the emulated GPU the bytes are charged to scale-up when the slot is
 * sent or given back.
 *
 * Waits end when the engine is done, which depends on no peer: they have no deadline. */
#ifndef FUSELINK_BULK_CUH
#define FUSELINK_BULK_CUH

#include "simt.h"

/* Starts to copy `bytes` from shared memory, which the scope's threads have filled by ordinary stores, to a slot. It must not be
 * changed before fl_bulk_finish. */
template <typename Scope>
FL_FN void fl_bulk_store(Scope scope, uint64_t slot_addr, const void* shared, uint32_t bytes) {
  fl_fence_engine(); /* this thread's stores to shared memory before the engine's loads */
  fl_sync(scope);
  if (fl_elected(scope)) fl_engine_store(slot_addr, shared, bytes);
}

/* Waits until all that the scope has started to store is written, and makes it the elected thread's, as if by ordinary stores:
 * then the slot may be sent. */
template <typename Scope>
FL_FN void fl_bulk_finish(Scope scope) {
  if (fl_elected(scope)) {
    fl_engine_finish();
    fl_fence_engine(); /* the engine's stores before the fence that precedes the doorbell */
  }
  fl_sync(scope);
}

/* Loads of one scope to shared memory, one at a time: a barrier there, and which of its phases is next. */
struct FlBulkLoad {
  uint64_t* barrier;
  uint32_t parity;
};

/* `barrier` is a word of shared memory that nobody else uses. */
template <typename Scope>
FL_FN FlBulkLoad fl_bulk_loader(Scope scope, uint64_t* barrier) {
  if (fl_elected(scope)) {
    fl_engine_barrier_init(barrier);
    fl_fence_engine(); /* the barrier before the engine counts on it */
  }
  fl_sync(scope);
  return FlBulkLoad{barrier, 0};
}

/* Starts to copy `bytes` of a message that has come to shared memory. What the scope's threads have done with that memory before
 * is done; its next fl_bulk_await tells when it is filled. */
template <typename Scope>
FL_FN void fl_bulk_load(Scope scope, FlBulkLoad* load, void* shared, uint64_t slot_addr, uint32_t bytes) {
  fl_fence_engine(); /* this thread's accesses of shared memory, and the arrival that it has acquired, before the engine's */
  fl_sync(scope);
  if (fl_elected(scope)) fl_engine_load(load->barrier, shared, slot_addr, bytes);
}

/* Waits until that copy is there, for each thread of the scope. The slot may then be given back. */
template <typename Scope>
FL_FN void fl_bulk_await(Scope, FlBulkLoad* load) {
  while (!fl_engine_is_loaded(load->barrier, load->parity)) {
  }
  load->parity ^= 1;
}

#endif
