/* An all-to-all by puts, as a user might write it: one block sends and takes whatever can go, with no plan and no wait for
 * one peer while another is ready. */

#include <fuselink/device.cuh>

/* tests/common/exchange.rs mirrors these. */
struct Exchange {
  FlStream stream;
  uint64_t send_ptr;  /* messages to each rank: bytes * messages each */
  uint64_t recv_ptr;  /* messages from each rank, likewise */
  uint64_t sent_ptr;  /* uint64_t[ranks], zero */
  uint64_t taken_ptr; /* uint64_t[ranks], zero */
  uint64_t bytes;
  uint64_t messages; /* to and from each rank, itself among them */
};

/* Sends the next message to a rank if there is a slot for it; whether it did. */
FL_FN bool send_next(const Exchange* p, uint32_t dst, bool* failed) {
  FlBlockScope block;
  uint64_t* sent = fl_at<uint64_t>(p->sent_ptr) + dst;
  uint64_t i = fl_broadcast(block, *sent);
  if (i == p->messages) return false;
  FlSlot slot = fl_poll_slot(block, &p->stream, dst);
  if (slot.addr == 0) return false;
  /* Messages get shorter, so that none is like another. */
  uint64_t bytes = p->bytes - i % p->bytes;
  fl_copy(block, slot.addr, p->send_ptr + (dst * p->messages + i) * p->bytes, bytes);
  *failed = !fl_send_with_signal(block, &p->stream, dst, slot, bytes, fl_add_to(0, 1));
  if (fl_elected(block)) *sent = i + 1;
  return true;
}

/* Takes the next message of a rank if it has come; whether it did. */
FL_FN bool take_next(const Exchange* p, uint32_t src, bool* failed) {
  FlBlockScope block;
  uint64_t* taken = fl_at<uint64_t>(p->taken_ptr) + src;
  uint64_t i = fl_broadcast(block, *taken);
  if (i == p->messages) return false;
  FlMessage message = fl_poll_message(block, &p->stream, src);
  if (message.addr == 0) return false;
  fl_copy(block, p->recv_ptr + (src * p->messages + i) * p->bytes, message.addr, message.bytes);
  *failed = message.bytes != p->bytes - i % p->bytes || !fl_give_back(block, &p->stream, message);
  if (fl_elected(block)) *taken = i + 1;
  return true;
}

FL_KERNEL(test_exchange, Exchange) {
  FlBlockScope block;
  const FlChannel* ch = fl_channel(&p->stream);
  uint32_t ranks = p->stream.ranks;
  uint64_t left = 2 * p->messages * ranks;
  FlPatience patience = fl_patience(p->stream.timeout_ns);
  bool failed = false;
  while (left > 0 && !failed) {
    uint64_t before = left;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      if (send_next(p, rank, &failed)) left -= 1;
      if (!failed && take_next(p, rank, &failed)) left -= 1;
      if (failed) break;
    }
    uint64_t code = FL_STATUS_OK;
    if (left != before) {
      fl_progress(&patience);
    } else if (fl_elected(block)) {
      code = fl_idle(ch, &patience, FL_STATUS_NO_MESSAGE);
      if (code != FL_STATUS_OK) fl_give_up(ch, code, ranks, left);
    }
    if (fl_broadcast(block, code) != FL_STATUS_OK) return;
  }
  if (failed) {
    if (fl_elected(block)) fl_give_up(ch, FL_STATUS_BAD_MESSAGE, ranks, left);
    return;
  }
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    if (!fl_flush(block, &p->stream, rank)) return;
  }
  fl_wait_more(block, &p->stream, 0, p->messages * ranks);
}
