/* Kernels that know one address only, as a captured graph would launch them: the same parameters each time, and what differs
 * by message in device memory. */

#include <fuselink/device.cuh>

/* tests/common/fixed.rs mirrors it. */
struct Fixed {
  uint64_t data_ptr;  /* the fixed window */
  uint64_t words;     /* of the first message; each is a word shorter than the one before */
  uint64_t state_ptr; /* messages so far; wrong words so far; what test_hold waits for */
  uint64_t seed;
};

FL_FN uint64_t fixed_word(uint64_t seed, uint64_t message, uint64_t word) {
  return ((seed + message) << 32 ^ word) * 0x9e3779b97f4a7c15u;
}

/* Writes the next message. */
FL_KERNEL(test_fixed_write, Fixed) {
  uint64_t* state = fl_at<uint64_t>(p->state_ptr);
  uint64_t message = state[0];
  for (uint64_t w = fl_thread_idx(); w < p->words - message; w += fl_thread_count()) {
    fl_at<uint64_t>(p->data_ptr)[w] = fixed_word(p->seed, message, w);
  }
  fl_sync(FlBlockScope());
  if (fl_elected()) state[0] = message + 1;
}

/* Reads the next message in place. */
FL_KERNEL(test_fixed_read, Fixed) {
  uint64_t* state = fl_at<uint64_t>(p->state_ptr);
  uint64_t message = state[0];
  uint64_t wrong = 0;
  for (uint64_t w = fl_thread_idx(); w < p->words - message; w += fl_thread_count()) {
    wrong += fl_at<uint64_t>(p->data_ptr)[w] != fixed_word(p->seed, message, w);
  }
  if (wrong > 0) fl_add_acq_rel_gpu(state + 1, wrong);
  fl_sync(FlBlockScope());
  if (fl_elected()) state[0] = message + 1;
}

/* Runs until the host says so, for 20 s at most. */
FL_KERNEL(test_fixed_hold, Fixed) {
  uint64_t late_ns = fl_now_ns() + 20000000000u;
  while (fl_load_relaxed_sys(fl_at<uint64_t>(p->state_ptr) + 2) == 0 && fl_now_ns() < late_ns) fl_pause(1);
}
