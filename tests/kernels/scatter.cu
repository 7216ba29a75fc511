/* Items of any length to any ranks, in the order of a list that each block takes from when it can: everybody sends, everybody takes
 * in place, and nobody waits for one peer while another is ready. tests/common/scatter.rs mirrors this. */

#include <fuselink/device.cuh>

#define SCATTER_SIGNALS 4

struct Scatter {
  FlStream stream;
  uint64_t items_ptr;                      /* uint64_t[items]: destination << 32 | bytes, multiples of 8; 0 bytes: a signal alone */
  uint64_t items;
  uint64_t due;                            /* messages with bytes, from all ranks */
  uint64_t signals_due[SCATTER_SIGNALS];   /* what signals must be in the end */
  uint64_t sums_ptr;                       /* uint64_t[ranks]: sums of the numbers of items that came */
  uint64_t next;                           /* scratch */
  uint64_t sent;
  uint64_t taken;
  uint64_t wrong;                          /* words that were not as sent, and signals that are not as due */
};

FL_FN uint64_t word_of(uint64_t id, uint64_t w) { return w == 0 ? id : id * 0x9e3779b97f4a7c15ull + w; }

/* Sends an item if there is a slot; whether it did. */
FL_FN bool send_item(Scatter* p, uint64_t item, bool* failed) {
  FlBlockScope block;
  uint64_t what = fl_at<const uint64_t>(p->items_ptr)[item];
  uint32_t dst = (uint32_t)(what >> 32), bytes = (uint32_t)what;
  FlSlot slot = fl_poll_slot(block, &p->stream, dst);
  if (slot.addr == 0) return false;
  uint64_t id = (uint64_t)fl_channel(&p->stream)->rank << 32 | item;
  for (uint64_t w = fl_thread_idx(); w < bytes / 8; w += fl_thread_count()) fl_at<uint64_t>(slot.addr)[w] = word_of(id, w);
  FlSignal signal = fl_add_to((uint32_t)(item % SCATTER_SIGNALS), 1 + item);
  *failed = !fl_send_with_signal(block, &p->stream, dst, slot, bytes, signal);
  if (fl_elected(block)) fl_add_acq_rel_gpu(&p->sent, 1);
  return true;
}

/* Takes a message of a rank if one has come; whether it did. */
FL_FN bool take_item(Scatter* p, uint32_t src, bool* failed) {
  FlBlockScope block;
  FlMessage message = fl_poll_message(block, &p->stream, src);
  if (message.addr == 0) return false;
  const uint64_t* words = fl_at<const uint64_t>(message.addr);
  uint64_t id = words[0], wrong = id >> 32 != src;
  for (uint64_t w = fl_thread_idx(); w < message.bytes / 8; w += fl_thread_count()) wrong += words[w] != word_of(id, w);
  if (wrong) fl_add_acq_rel_gpu(&p->wrong, wrong);
  *failed = !fl_give_back(block, &p->stream, message);
  if (fl_elected(block)) {
    fl_add_acq_rel_gpu(fl_at<uint64_t>(p->sums_ptr) + src, (id & 0xffffffff) + 1);
    fl_add_acq_rel_gpu(&p->taken, 1);
  }
  return true;
}

FL_KERNEL(test_scatter, Scatter) {
  FlBlockScope block;
  FlPatience patience = fl_patience(p->stream.timeout_ns);
  bool in_hand = false, failed = false;
  uint64_t item = 0;
  for (;;) {
    if (!in_hand) item = fl_broadcast(block, fl_elected(block) ? fl_add_acq_rel_gpu(&p->next, 1) : 0);
    in_hand = item < p->items;
    bool moved = in_hand && send_item(p, item, &failed);
    if (moved) in_hand = false;
    for (uint32_t src = 0; src < p->stream.ranks && !failed; ++src) moved |= take_item(p, src, &failed);
    if (failed) return;
    uint64_t sent = fl_load_acquire_gpu(&p->sent), taken = fl_load_acquire_gpu(&p->taken);
    if (fl_broadcast(block, sent == p->items && taken == p->due)) break;
    if (moved) {
      fl_progress(&patience);
      continue;
    }
    uint64_t code = fl_elected(block) ? fl_idle(fl_channel(&p->stream), &patience, FL_STATUS_NO_MESSAGE) : 0;
    if (code != FL_STATUS_OK) fl_give_up(fl_channel(&p->stream), code, p->stream.ranks, taken);
    if (fl_broadcast(block, code) != FL_STATUS_OK) return;
  }
  for (uint32_t dst = 0; dst < p->stream.ranks; ++dst) {
    if (!fl_flush(block, &p->stream, dst)) return;
  }
  for (uint32_t i = 0; i < SCATTER_SIGNALS; ++i) {
    if (!fl_wait(block, &p->stream, i, p->signals_due[i])) return;
    bool exact = fl_poll(block, &p->stream, i) == p->signals_due[i];
    if (!exact && fl_elected(block)) fl_add_acq_rel_gpu(&p->wrong, 1);
  }
  uint64_t wrong = fl_load_acquire_gpu(&p->wrong);
  if (wrong != 0 && fl_elected(block)) fl_give_up(fl_channel(&p->stream), FL_STATUS_BAD_MESSAGE, p->stream.ranks, wrong);
}
