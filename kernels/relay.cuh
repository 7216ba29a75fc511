/* Slots: where a message is written before it leaves, and where it lies after it has come in. Either may be in the
 * memory of another GPU of the server; the kernel only sees addresses. */
#ifndef FUSELINK_RELAY_CUH
#define FUSELINK_RELAY_CUH

#include "doorbell.cuh"

/* An armed slot: where to write which message. addr is 0 when the host has not armed it yet. */
struct FlSlot {
  uint64_t addr;
  uint64_t message;
};

/* The slot at `idx` of a queue. Elected thread. The caller knows that the place at idx - armed_depth has been armed: one
 * bit cannot tell every second lap from each other. */
FL_FN FlSlot fl_armed_slot(const FlChannel* ch, uint32_t queue, uint64_t idx) {
  const FlArmedSlot* ring = fl_at<FlArmedSlot>(ch->armed_ptr) + (uint64_t)queue * ch->armed_depth;
  const FlArmedSlot* slot = ring + idx % ch->armed_depth;
  uint64_t lap = fl_lap(idx, ch->armed_depth);
  uint64_t addr = fl_load_relaxed_sys(&slot->dev_addr);
  uint64_t message = fl_load_relaxed_sys(&slot->message);
  if (!fl_shows_lap(addr, lap) || !fl_shows_lap(message, lap)) return FlSlot{0, 0};
  fl_fence_sys(); /* the host has seen the slot's last send complete before it armed it again */
  return FlSlot{fl_without_lap(addr), fl_without_lap(message)};
}

/* Copies a message into its slot and rings the doorbell. Whole block. False when the ring stayed full. */
FL_FN bool fl_send_message(const FlChannel* ch, uint64_t timeout_ns, uint32_t msg_class, uint32_t queue, uint64_t idx,
                           uint64_t slot_addr, uint64_t src, uint64_t bytes) {
  fl_block_copy(slot_addr, src, bytes);
  fl_block_sync();
  uint64_t sent = 1;
  if (fl_elected()) {
    sent = fl_doorbell_push(ch, timeout_ns, fl_doorbell_word0(FL_OP_SEND, msg_class, queue), idx, bytes);
  }
  return fl_broadcast(sent) != 0;
}

/* One arrival, claimed. addr is 0 when there was none. */
struct FlClaim {
  uint64_t addr;
  uint64_t seq;
  uint32_t src;
  uint32_t bytes;
  uint64_t slot;
};

/* Claims the oldest arrival if there is one. Elected thread. An entry cannot change between the check and the claim:
 * the host writes its place again only after this message has been drained. */
FL_FN FlClaim fl_claim_arrival(const FlChannel* ch) {
  uint64_t* next = fl_at<uint64_t>(ch->arrival_next_ptr);
  uint64_t idx = fl_load_relaxed_gpu(next);
  const FlArrival* entry = fl_at<FlArrival>(ch->arrivals_ptr) + idx % ch->arrival_capacity;
  uint64_t lap = fl_lap(idx, ch->arrival_capacity);
  uint64_t addr = fl_load_relaxed_sys(&entry->dev_addr);
  uint64_t seq = fl_load_relaxed_sys(&entry->seq);
  uint64_t src_bytes = fl_load_relaxed_sys(&entry->src_bytes);
  uint64_t slot = fl_load_relaxed_sys(&entry->slot);
  FlClaim none = {0, 0, 0, 0, 0};
  if (!fl_shows_lap(addr, lap) || !fl_shows_lap(seq, lap) || !fl_shows_lap(src_bytes, lap) || !fl_shows_lap(slot, lap)) {
    return none;
  }
  if (!fl_cas_relaxed_gpu(next, idx, idx + 1)) return none;
  fl_fence_sys(); /* arrival before payload: pairs with the host's release of the entry, after its flush */
  src_bytes = fl_without_lap(src_bytes);
  return FlClaim{fl_without_lap(addr), fl_without_lap(seq), (uint32_t)(src_bytes >> 32), (uint32_t)src_bytes,
                 fl_without_lap(slot)};
}

/* Every thread gets the elected thread's claim. */
FL_FN FlClaim fl_broadcast_claim(FlClaim claim) {
  uint64_t src_bytes = (uint64_t)claim.src << 32 | claim.bytes;
  claim.addr = fl_broadcast(claim.addr);
  if (claim.addr == 0) return claim;
  claim.seq = fl_broadcast(claim.seq);
  src_bytes = fl_broadcast(src_bytes);
  claim.slot = fl_broadcast(claim.slot);
  claim.src = (uint32_t)(src_bytes >> 32);
  claim.bytes = (uint32_t)src_bytes;
  return claim;
}

/* Copies a message out of its slot and gives the slot back. Whole block. False when the ring stayed full. */
FL_FN bool fl_drain_message(const FlChannel* ch, uint64_t timeout_ns, FlClaim claim, uint64_t dst) {
  fl_block_copy(dst, claim.addr, claim.bytes);
  fl_block_sync();
  uint64_t told = 1;
  if (fl_elected()) {
    uint32_t msg_class = (uint32_t)(claim.slot >> 60);
    uint64_t nic = claim.slot >> 32 & 0xfffffff;
    told = fl_doorbell_push(ch, timeout_ns, fl_doorbell_word0(FL_OP_DRAINED, msg_class, 0), claim.slot & 0xffffffff, nic);
  }
  return fl_broadcast(told) != 0;
}

#endif
