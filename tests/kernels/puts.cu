/* Kernels as a user writes them, with every call of the device header in every scope, and the copy of lanes for tests that
 * have no GPU. */

#include <fuselink/device.cuh>

/* tests/device_puts.rs mirrors these. */
struct PutTest {
  FlStream stream;
  uint64_t data_ptr;
  uint64_t bytes; /* of each item */
  uint64_t items;
  uint32_t peer;
  uint32_t scope; /* 0 thread, 1 warp, 2 block */
  uint64_t next;  /* scratch: next item to claim */
  uint64_t done;  /* scratch: items done by all */
};

/* The next item, claimed for a scope. */
template <typename Scope>
FL_FN uint64_t claim(Scope scope, PutTest* p) {
  return fl_broadcast(scope, fl_elected(scope) ? fl_add_acq_rel_gpu(&p->next, 1) : 0);
}

/* Puts items; each adds 1 to signal 0, and sets signal 1 to its number + 1. Ends when all are in the peer's memory. */
template <typename Scope>
FL_FN void put_items(Scope scope, PutTest* p) {
  for (uint64_t i = claim(scope, p); i < p->items; i = claim(scope, p)) {
    uint64_t src = p->data_ptr + i * p->bytes;
    if (!fl_put_with_signal(scope, &p->stream, p->peer, src, p->bytes, fl_add_to(0, 1))) return;
    if (!fl_signal(scope, &p->stream, p->peer, fl_set(1, i + 1))) return;
  }
  if (fl_flush(scope, &p->stream, p->peer) && fl_elected(scope)) fl_add_acq_rel_gpu(&p->done, 1);
}

FL_KERNEL(test_put, PutTest) {
  if (p->scope == 0) put_items(FlThreadScope(), p);
  if (p->scope == 1) put_items(FlWarpScope(), p);
  if (p->scope == 2) put_items(FlBlockScope(), p);
}

/* In place: item i is the 8-byte number i + 1, over and over; nothing is copied. */
template <typename Scope>
FL_FN void produce_items(Scope scope, PutTest* p, uint32_t lane, uint32_t lanes) {
  for (uint64_t i = claim(scope, p); i < p->items; i = claim(scope, p)) {
    FlSlot slot = fl_poll_slot(scope, &p->stream, p->peer);
    if (slot.addr == 0) slot = fl_wait_slot(scope, &p->stream, p->peer);
    if (slot.addr == 0) return;
    for (uint64_t w = lane; w < p->bytes / 8; w += lanes) fl_at<uint64_t>(slot.addr)[w] = slot.idx + 1;
    if (!fl_send(scope, &p->stream, p->peer, slot, p->bytes)) return;
  }
}

FL_KERNEL(test_produce, PutTest) {
  if (p->scope == 0) produce_items(FlThreadScope(), p, 0, 1);
  if (p->scope == 1) produce_items(FlWarpScope(), p, fl_thread_idx() % 32, 32 < fl_thread_count() ? 32 : fl_thread_count());
  if (p->scope == 2) produce_items(FlBlockScope(), p, fl_thread_idx(), fl_thread_count());
}

/* Takes messages of the peer in their order, each into its place; `items` messages of at most `bytes`. */
template <typename Scope>
FL_FN void take_items(Scope scope, PutTest* p) {
  for (uint64_t i = claim(scope, p); i < p->items; i = claim(scope, p)) {
    FlMessage message = fl_wait_message(scope, &p->stream, p->peer);
    if (message.addr == 0) return;
    fl_copy(scope, p->data_ptr + message.seq * p->bytes, message.addr, message.bytes);
    if (!fl_give_back(scope, &p->stream, message)) return;
    if (fl_elected(scope)) fl_add_acq_rel_gpu(&p->done, 1);
  }
}

FL_KERNEL(test_take, PutTest) {
  if (p->scope == 0) take_items(FlThreadScope(), p);
  if (p->scope == 1) take_items(FlWarpScope(), p);
  if (p->scope == 2) take_items(FlBlockScope(), p);
}

/* Takes messages and reads them where they lie: all words of one are alike, and the sum over messages goes to the data. */
FL_KERNEL(test_read, PutTest) {
  FlBlockScope block;
  for (uint64_t i = claim(block, p); i < p->items; i = claim(block, p)) {
    FlMessage message = fl_wait_message(block, &p->stream, p->peer);
    if (message.addr == 0) return;
    const uint64_t* words = fl_at<const uint64_t>(message.addr);
    bool torn = false;
    for (uint64_t w = 1; w < message.bytes / 8; ++w) torn |= words[w] != words[0];
    if (fl_elected(block) && !torn) fl_add_acq_rel_gpu(fl_at<uint64_t>(p->data_ptr), words[0]);
    if (!fl_give_back(block, &p->stream, message)) return;
  }
}

/* Claims `items` slots and sends them from the last to the first, each with signal 0 by 1 and signal 1 set to its number + 1,
 * but never the one that `bytes` names; then flushes. */
FL_KERNEL(test_backwards, PutTest) {
  FlBlockScope block;
  FL_SHARED FlSlot slots[FL_LOCAL_DEPTH]; /* in registers they cannot be found by number, and kernels keep no stack */
  for (uint64_t i = 0; i < p->items; ++i) {
    FlSlot slot = fl_wait_slot(block, &p->stream, p->peer);
    if (slot.addr == 0) return;
    if (fl_elected(block)) slots[i] = slot;
  }
  fl_sync(block);
  for (uint64_t i = p->items; i-- > 0;) {
    if (i == p->bytes) continue;
    if (fl_elected(block)) fl_at<uint64_t>(slots[i].addr)[0] = slots[i].idx + 1;
    if (!fl_send_with_signal(block, &p->stream, p->peer, slots[i], 8, fl_add_to(0, 1))) return;
    if (i == 0 && !fl_signal(block, &p->stream, p->peer, fl_set(1, p->items))) return;
  }
  if (fl_flush(block, &p->stream, p->peer) && fl_elected(block)) p->done = 1;
}

/* Waits until signal 0 has grown by `items` since the launch before, and stores signal 1 where it is told. */
template <typename Scope>
FL_FN void wait_for_items(Scope scope, PutTest* p) {
  if (!fl_wait_more(scope, &p->stream, 0, p->items)) return;
  uint64_t last = fl_poll(scope, &p->stream, 1);
  if (fl_elected(scope)) fl_at<uint64_t>(p->data_ptr)[0] = last;
}

FL_KERNEL(test_wait, PutTest) {
  if (p->scope == 0) wait_for_items(FlThreadScope(), p);
  if (p->scope == 1) wait_for_items(FlWarpScope(), p);
  if (p->scope == 2) wait_for_items(FlBlockScope(), p);
}

/* Asks for what is not there: `items` says what. */
FL_KERNEL(test_misuse, PutTest) {
  FlBlockScope scope;
  bool good = true;
  if (p->items == 0) good = fl_put(scope, &p->stream, p->peer, p->data_ptr, 8);
  if (p->items == 1) good = fl_wait(scope, &p->stream, p->peer, 0);
  if (p->items == 2) good = fl_wait_message(scope, &p->stream, p->peer).addr != 0;
  if (p->items == 3) good = fl_send(scope, &p->stream, 0, fl_wait_slot(scope, &p->stream, 0), p->stream.slot_bytes + 1);
  if (p->items == 4) good = fl_wait_more(scope, &p->stream, p->peer, 0);
  if (p->items == 5) {
    FlSlot slot = fl_wait_slot(scope, &p->stream, p->peer);
    good = fl_send(scope, &p->stream, p->peer, slot, 8) && fl_send(scope, &p->stream, p->peer, slot, 8);
  }
  if (p->items == 6) good = fl_signal(scope, &p->stream, p->peer, fl_add_to(p->stream.signals, 1));
  if (fl_elected(scope)) p->done = good;
}

FL_KERNEL(test_wait_value, PutTest) {
  bool reached = fl_wait(FlBlockScope(), &p->stream, p->peer, p->items);
  if (fl_elected()) p->done = reached;
}

#ifndef __CUDACC__ /* a GPU has lanes of its own */
extern "C" void test_copy_lanes(uint64_t dst, uint64_t src, uint64_t bytes, uint32_t lane, uint32_t lanes) {
  fl_copy_lanes(dst, src, bytes, lane, lanes);
}
#endif
