/* Slots: where a message is written before it leaves, and where it lies after it has come in. Either may be in the
 * memory of another GPU of the server; the kernel only sees addresses.
 *
 * Both are claimed only when they are there: whoever gives up waiting leaves no gap behind. The counters of what was
 * claimed are read with acquire and moved on with release, so that whoever claims place i of a ring has seen at least what
 * the claimer of place i - depth saw there. Without that a thread might still see the entry two laps back, which shows
 * the same lap bit. */
#ifndef FUSELINK_RELAY_CUH
#define FUSELINK_RELAY_CUH

#include "doorbell.cuh"

/* A slot to be filled: where, as which message, and its place in the queue. addr is 0 when there is none. */
struct FlSlot {
  uint64_t addr;
  uint64_t message;
  uint64_t idx;
};

/* The slot at `idx` of a queue, if it is armed. One thread, which knows that place idx - armed_depth was armed. */
FL_FN FlSlot fl_armed_slot(const FlChannel* ch, uint32_t queue, uint64_t idx) {
  const FlArmedSlot* ring = fl_at<FlArmedSlot>(ch->armed_ptr) + (uint64_t)queue * ch->armed_depth;
  const FlArmedSlot* slot = ring + idx % ch->armed_depth;
  uint64_t lap = fl_lap(idx, ch->armed_depth);
  uint64_t addr = fl_load_relaxed_sys(&slot->dev_addr);
  uint64_t message = fl_load_relaxed_sys(&slot->message);
  if (!fl_shows_lap(addr, lap) || !fl_shows_lap(message, lap)) return FlSlot{0, 0, idx};
  fl_fence_sys(); /* the host has seen the slot's last send complete before it armed it again */
  return FlSlot{fl_without_lap(addr), fl_without_lap(message), idx};
}

/* Claims the next slot of a queue if it is armed. One thread. */
FL_FN FlSlot fl_claim_slot(const FlChannel* ch, uint32_t queue) {
  uint64_t* next = fl_at<uint64_t>(ch->queue_next_ptr) + queue;
  uint64_t idx = fl_load_acquire_gpu(next);
  FlSlot slot = fl_armed_slot(ch, queue, idx);
  if (slot.addr != 0 && !fl_cas_acq_rel_gpu(next, idx, idx + 1)) slot.addr = 0;
  return slot;
}

template <typename Scope>
FL_FN FlSlot fl_broadcast_slot(Scope scope, FlSlot slot) {
  slot.addr = fl_broadcast(scope, slot.addr);
  if (slot.addr == 0) return slot;
  slot.message = fl_broadcast(scope, slot.message);
  slot.idx = fl_broadcast(scope, slot.idx);
  return slot;
}

/* Rings for a slot that the scope's threads have filled. False when the ring stayed full. */
template <typename Scope>
FL_FN bool fl_ring(Scope scope, const FlChannel* ch, uint64_t timeout_ns, FlDoorbell descriptor) {
  fl_sync(scope);
  uint64_t told = 1;
  if (fl_elected(scope)) told = fl_doorbell_push(ch, timeout_ns, descriptor);
  return fl_broadcast(scope, told) != 0;
}

/* A message that has come, claimed. addr is 0 when there was none. */
struct FlMessage {
  uint64_t addr;
  uint64_t seq;
  uint32_t src;
  uint32_t bytes;
  uint64_t slot;
};

/* Claims message `idx` of a ring of arrivals if it is there: `*next`, which was seen to be idx, moves on. One thread. The
 * entry cannot change between the check and the claim: its place is written again only after it was drained. */
FL_FN FlMessage fl_claim_arrival(uint64_t* next, uint64_t idx, const FlArrival* ring, uint64_t capacity) {
  const FlArrival* entry = ring + idx % capacity;
  uint64_t lap = fl_lap(idx, capacity);
  uint64_t addr = fl_load_relaxed_sys(&entry->dev_addr);
  uint64_t seq = fl_load_relaxed_sys(&entry->seq);
  uint64_t src_bytes = fl_load_relaxed_sys(&entry->src_bytes);
  uint64_t slot = fl_load_relaxed_sys(&entry->slot);
  FlMessage none = {0, 0, 0, 0, 0};
  if (!fl_shows_lap(addr, lap) || !fl_shows_lap(seq, lap) || !fl_shows_lap(src_bytes, lap) || !fl_shows_lap(slot, lap)) {
    return none;
  }
  if (!fl_cas_acq_rel_gpu(next, idx, idx + 1)) return none;
  fl_fence_sys(); /* arrival before payload: pairs with the host's release of the entry, after its flush */
  src_bytes = fl_without_lap(src_bytes);
  return FlMessage{fl_without_lap(addr), fl_without_lap(seq), (uint32_t)(src_bytes >> 32), (uint32_t)src_bytes,
                   fl_without_lap(slot)};
}

/* The oldest message of a call, from anybody. One thread. */
FL_FN FlMessage fl_next_arrival(const FlChannel* ch) {
  uint64_t* next = fl_at<uint64_t>(ch->arrival_next_ptr);
  return fl_claim_arrival(next, fl_load_acquire_gpu(next), fl_at<FlArrival>(ch->arrivals_ptr), ch->arrival_capacity);
}

template <typename Scope>
FL_FN FlMessage fl_broadcast_message(Scope scope, FlMessage message) {
  uint64_t src_bytes = (uint64_t)message.src << 32 | message.bytes;
  message.addr = fl_broadcast(scope, message.addr);
  if (message.addr == 0) return message;
  message.seq = fl_broadcast(scope, message.seq);
  src_bytes = fl_broadcast(scope, src_bytes);
  message.slot = fl_broadcast(scope, message.slot);
  message.src = (uint32_t)(src_bytes >> 32);
  message.bytes = (uint32_t)src_bytes;
  return message;
}

/* Copies a message out of its slot and gives the slot back. Whole block. False when the ring stayed full. */
FL_FN bool fl_drain_message(const FlChannel* ch, uint64_t timeout_ns, FlMessage message, uint64_t dst) {
  fl_block_copy(dst, message.addr, message.bytes);
  return fl_ring(FlBlockScope(), ch, timeout_ns, fl_doorbell_drained(message.slot));
}

#endif
