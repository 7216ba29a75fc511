/* The kernel's side of the doorbell ring, and of every other polled word.
 *
 * Producer: claim an index, wait until the host has read what lay in its place, store four words. No order among the
 * four is needed: each carries the lap bit, and the host takes a descriptor only when all four show the lap that is
 * due. Order with the *payload* is needed: the elected thread fences between the block barrier that closes the copy
 * and the doorbell (fl_doorbell_push does it), and the host's acquire after the last word pairs with that fence. */
#ifndef FUSELINK_DOORBELL_CUH
#define FUSELINK_DOORBELL_CUH

#include "simt.h"

FL_FN uint64_t fl_lap(uint64_t idx, uint64_t capacity) { return ((idx / capacity) & 1) ^ 1; }
FL_FN uint64_t fl_with_lap(uint64_t value, uint64_t lap) { return value | lap << FL_LAP_SHIFT; }
FL_FN bool fl_shows_lap(uint64_t word, uint64_t lap) { return word >> FL_LAP_SHIFT == lap; }
FL_FN uint64_t fl_without_lap(uint64_t word) { return word & ~(1ull << FL_LAP_SHIFT); }

/* Says why this kernel gives up; the first reason stays. */
FL_FN void fl_give_up(const FlChannel* ch, uint64_t code, uint64_t detail0, uint64_t detail1) {
  FlStatus* status = fl_at<FlStatus>(ch->status_ptr);
  if (fl_cas_relaxed_sys(&status->code, FL_STATUS_OK, code)) {
    fl_store_relaxed_sys(&status->detail[0], detail0);
    fl_store_relaxed_sys(&status->detail[1], detail1);
  }
}

/* Bounds every wait: false when the host says stop, or when timeout_ns have passed without progress. */
struct FlPatience {
  uint64_t timeout_ns;
  uint64_t deadline_ns;
  uint32_t rounds;
};

FL_FN FlPatience fl_patience(uint64_t timeout_ns) { return FlPatience{timeout_ns, fl_now_ns() + timeout_ns, 0}; }

FL_FN void fl_progress(FlPatience* patience) {
  if (patience->rounds == 0) return;
  patience->rounds = 0;
  patience->deadline_ns = fl_now_ns() + patience->timeout_ns;
}

/* One idle round of the elected thread. Returns FlStatusCode: OK to go on, ABORTED, or `late` past the deadline. */
FL_FN uint64_t fl_idle(const FlChannel* ch, FlPatience* patience, uint64_t late) {
  if (patience->rounds == 0) patience->deadline_ns = fl_now_ns() + patience->timeout_ns;
  patience->rounds += 1;
  if (fl_load_relaxed_sys(fl_at<uint64_t>(ch->abort_ptr)) != 0) return FL_STATUS_ABORTED;
  if (fl_now_ns() > patience->deadline_ns) return late;
  fl_pause(patience->rounds);
  return FL_STATUS_OK;
}

FL_FN FlDoorbell fl_doorbell_send(uint32_t msg_class, uint32_t queue, uint64_t idx, uint64_t bytes) {
  return FlDoorbell{{(uint64_t)FL_OP_SEND | (uint64_t)msg_class << 8 | (uint64_t)queue << 16, idx, bytes, 0}};
}

/* Gives back the slot that an arrival named. */
FL_FN FlDoorbell fl_doorbell_drained(uint64_t arrival_slot) {
  uint64_t msg_class = arrival_slot >> 60, nic = arrival_slot >> 32 & 0xfffffff;
  return FlDoorbell{{(uint64_t)FL_OP_DRAINED | msg_class << 8, arrival_slot & 0xffffffff, nic, 0}};
}

/* Posts one descriptor: called by one thread, after the barrier that closes the copy of those it speaks for. False when the
 * ring stayed full. A full ring is waited for, so nothing is lost; each thread that waits holds a place of its own. */
FL_FN bool fl_doorbell_push(const FlChannel* ch, uint64_t timeout_ns, FlDoorbell descriptor) {
  uint32_t n = fl_block_idx() % ch->doorbell_rings;
  const FlRing* ring = fl_at<FlRing>(ch->doorbell_rings_ptr) + n;
  uint64_t idx = fl_add_acq_rel_gpu(fl_at<uint64_t>(ring->prod_idx_ptr), 1);
  FlPatience patience = fl_patience(timeout_ns);
  while (idx - fl_load_relaxed_sys(fl_at<uint64_t>(ring->cons_idx_ptr)) >= ring->capacity) {
    uint64_t code = fl_idle(ch, &patience, FL_STATUS_RING_FULL);
    if (code != FL_STATUS_OK) {
      fl_give_up(ch, code, n, idx);
      return false;
    }
  }
  uint64_t lap = fl_lap(idx, ring->capacity);
  FlDoorbell* entry = fl_at<FlDoorbell>(ring->entries_ptr) + idx % ring->capacity;
  fl_fence_sys(); /* payload before doorbell; also: the host's read of the old words before ours */
  for (int i = 0; i < 4; ++i) fl_store_relaxed_sys(&entry->word[i], fl_with_lap(descriptor.word[i], lap));
  return true;
}

#endif
