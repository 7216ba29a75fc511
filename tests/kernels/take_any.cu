/* Takes a known number of messages from ranks 0 and 1, whichever has one, each to the end of what its source has sent so far;
 * then a signal must say that all have come. tests/tutorial.rs mirrors this. */

#include <fuselink/device.cuh>

struct TakeAny {
  FlStream stream;
  uint64_t data_ptr;  /* two halves */
  uint64_t half;      /* bytes */
  uint64_t taken_ptr; /* uint64_t[2], zero */
  uint64_t bytes;     /* of a message */
  uint64_t items;
  uint32_t signal;
  uint32_t reserved;
};

FL_KERNEL(test_take_any, TakeAny) {
  FlWarpScope warp;
  if (fl_warp_idx() != 0) return;
  uint64_t* taken = fl_at<uint64_t>(p->taken_ptr);
  /* A signal for each message that has come: n + 1 of them mean that one at least has not been taken. */
  for (uint64_t n = 0; n < p->items; ++n) {
    if (!fl_wait(warp, &p->stream, p->signal, n + 1)) return;
    FlMessage message = fl_poll_message(warp, &p->stream, 0);
    if (message.addr == 0) message = fl_wait_message(warp, &p->stream, 1);
    if (message.addr == 0) return;
    uint64_t i = fl_broadcast(warp, taken[message.src]);
    fl_sync(warp);
    if (fl_elected(warp)) taken[message.src] = i + 1;
    fl_copy(warp, p->data_ptr + message.src * p->half + i * p->bytes, message.addr, message.bytes);
    if (!fl_give_back(warp, &p->stream, message)) return;
  }
}
