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

FL_FN uint64_t fl_doorbell_word0(uint32_t op, uint32_t msg_class, uint32_t queue) {
  return (uint64_t)op | (uint64_t)msg_class << 8 | (uint64_t)queue << 16;
}

/* Posts one descriptor; called by the elected thread after the block barrier. False when the ring stayed full. */
FL_FN bool fl_doorbell_push(const FlChannel* ch, uint64_t timeout_ns, uint64_t word0, uint64_t word1, uint64_t word2) {
  const FlRing* ring = fl_at<FlRing>(ch->doorbell_rings_ptr) + fl_block_idx() % ch->doorbell_rings;
  uint64_t idx = fl_add_acq_rel_gpu(fl_at<uint64_t>(ring->prod_idx_ptr), 1);
  FlPatience patience = fl_patience(timeout_ns);
  while (idx - fl_load_relaxed_sys(fl_at<uint64_t>(ring->cons_idx_ptr)) >= ring->capacity) {
    uint64_t code = fl_idle(ch, &patience, FL_STATUS_RING_FULL);
    if (code != FL_STATUS_OK) {
      fl_give_up(ch, code, fl_block_idx() % ch->doorbell_rings, idx);
      return false;
    }
  }
  uint64_t lap = fl_lap(idx, ring->capacity);
  FlDoorbell* entry = fl_at<FlDoorbell>(ring->entries_ptr) + idx % ring->capacity;
  fl_fence_sys(); /* payload before doorbell; also: the host's read of the old words before ours */
  fl_store_relaxed_sys(&entry->word[0], fl_with_lap(word0, lap));
  fl_store_relaxed_sys(&entry->word[1], fl_with_lap(word1, lap));
  fl_store_relaxed_sys(&entry->word[2], fl_with_lap(word2, lap));
  fl_store_relaxed_sys(&entry->word[3], fl_with_lap(0, lap));
  return true;
}

#endif
