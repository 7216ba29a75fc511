/* A stream of bytes to one peer (fl_put), and its receiving half (fl_take). Blocks share the stream message by
 * message; sequence numbers say where each belongs.
 *
 * A launch may be repeated with the same parameters, as a graph does that has captured it: the last block to end leaves
 * them as they were. By then no other block reads them again. */

#include "plan.cuh"
#include "relay.cuh"

/* Whether the place of message `i` of the stream has been armed for the message one lap before. Until then it may show
 * the one two laps before, whose lap bit is the same: more blocks may wait than there are places. Places are armed in
 * order, so that of i + 1 - depth messages moved one lies at i - depth or later. */
FL_FN bool is_next_in_place(const FlChannel* ch, const FlPut* p, uint64_t i) {
  if (i < ch->armed_depth) return true;
  bool turned = fl_load_relaxed_gpu(&p->moved) > i - ch->armed_depth;
  fl_fence_sys(); /* the mover's view of the place before ours: pairs with its addition to moved */
  return turned;
}

/* Waits until message `i` of the stream, whose first has place `first` of the queue, has a slot. Elected thread; 0 after
 * giving up. */
FL_FN uint64_t await_slot(const FlChannel* ch, const FlPut* p, uint32_t queue, uint64_t first, uint64_t i) {
  FlPatience patience = fl_patience(p->timeout_ns);
  for (;;) {
    uint64_t addr = is_next_in_place(ch, p, i) ? fl_armed_slot(ch, queue, first + i).addr : 0;
    if (addr != 0) return addr;
    uint64_t code = fl_idle(ch, &patience, FL_STATUS_NO_ARMED_SLOT);
    if (code == FL_STATUS_OK) continue;
    fl_give_up(ch, code, fl_load_relaxed_gpu(&p->moved), fl_messages(p->bytes, p->message_bytes));
    return 0;
  }
}

/* For the elected thread of the last block. */
FL_FN void rewind(FlPut* p) {
  fl_store_relaxed_gpu(&p->moved, 0);
  fl_store_relaxed_gpu(&p->next, 0);
}

FL_KERNEL(fl_put, FlPut) {
  const FlChannel* ch = fl_at<const FlChannel>(p->channel_ptr);
  uint64_t messages = fl_messages(p->bytes, p->message_bytes);
  uint32_t queue = ch->work_queues + p->peer;
  uint64_t* queue_next = fl_at<uint64_t>(ch->queue_next_ptr) + queue;
  uint64_t first = fl_broadcast(fl_load_relaxed_gpu(queue_next));
  for (;;) {
    uint64_t i = fl_broadcast(fl_elected() ? fl_add_acq_rel_gpu(&p->next, 1) : 0);
    if (i >= messages) { /* each block once, after it has moved what it claimed */
      if (i + 1 == messages + fl_block_count() && fl_elected()) rewind(p);
      return;
    }
    uint64_t bytes = fl_message_bytes(p->bytes, p->message_bytes, i);
    uint64_t addr = fl_broadcast(fl_elected() ? await_slot(ch, p, queue, first, i) : 0);
    if (addr == 0) return;
    uint64_t src = p->data_ptr + i * p->message_bytes;
    fl_block_copy(addr, src, bytes);
    FlDoorbell descriptor = fl_doorbell_send(p->msg_class, queue, first + i, bytes);
    if (!fl_ring(FlBlockScope(), ch, p->timeout_ns, descriptor)) return;
    /* The last message moves the queue on: blocks that start after that find nothing left to claim. */
    if (fl_elected() && fl_add_acq_rel_gpu(&p->moved, 1) + 1 == messages) fl_store_relaxed_gpu(queue_next, first + messages);
  }
}

/* Drains the next message of the stream into its place. Whole block. */
FL_FN bool take_one(const FlChannel* ch, FlPut* p, bool* failed) {
  FlMessage claim = {0, 0, 0, 0, 0};
  if (fl_elected()) claim = fl_next_arrival(ch);
  claim = fl_broadcast_message(FlBlockScope(), claim);
  if (claim.addr == 0) return false;
  bool known = claim.src == p->peer && claim.bytes == fl_message_bytes(p->bytes, p->message_bytes, claim.seq);
  if (!known || claim.bytes == 0) {
    if (fl_elected()) fl_give_up(ch, FL_STATUS_BAD_ARRIVAL, claim.src, claim.seq);
    *failed = true;
    return false;
  }
  *failed = !fl_drain_message(ch, p->timeout_ns, claim, p->data_ptr + claim.seq * p->message_bytes);
  if (fl_elected()) fl_add_acq_rel_gpu(&p->moved, 1);
  return true;
}

FL_KERNEL(fl_take, FlPut) {
  const FlChannel* ch = fl_at<const FlChannel>(p->channel_ptr);
  uint64_t messages = fl_messages(p->bytes, p->message_bytes);
  FlPatience patience = fl_patience(p->timeout_ns);
  uint64_t seen = 0;
  bool failed = false;
  for (;;) {
    uint64_t moved = fl_broadcast(fl_load_relaxed_gpu(&p->moved));
    if (moved >= messages) { /* `next` counts the blocks that have seen it */
      if (fl_elected() && fl_add_acq_rel_gpu(&p->next, 1) + 1 == fl_block_count()) rewind(p);
      return;
    }
    if (moved != seen) fl_progress(&patience);
    seen = moved;
    bool took = take_one(ch, p, &failed);
    if (failed) return;
    if (took) continue;
    uint64_t code = FL_STATUS_OK;
    if (fl_elected()) code = fl_idle(ch, &patience, FL_STATUS_NO_ARRIVAL);
    if (code != FL_STATUS_OK) fl_give_up(ch, code, moved, messages);
    if (fl_broadcast(code) != FL_STATUS_OK) return;
  }
}
