/* Reading a PlanTable. */
#ifndef FUSELINK_PLAN_CUH
#define FUSELINK_PLAN_CUH

#include "simt.h"

FL_FN const FlPlanSend* fl_plan_sends(const FlPlanHeader* t) {
  return fl_at<const FlPlanSend>((uint64_t)t + t->send_offset);
}
FL_FN const FlPlanLocal* fl_plan_locals(const FlPlanHeader* t) {
  return fl_at<const FlPlanLocal>((uint64_t)t + t->local_offset);
}

/* The piece of which message `seq` of `src` is part, or null: the last of the source's pieces that starts at or below
 * seq, by bisection (pieces lie by first_seq). */
FL_FN const FlPlanRecv* fl_plan_find_recv(const FlPlanHeader* t, uint32_t src, uint64_t seq) {
  if (src >= t->ranks) return nullptr;
  const uint32_t* index = fl_at<const uint32_t>((uint64_t)t + t->recv_index_offset);
  const FlPlanRecv* recvs = fl_at<const FlPlanRecv>((uint64_t)t + t->recv_offset);
  uint32_t low = index[src], high = index[src + 1];
  while (high - low > 1) {
    uint32_t mid = low + (high - low) / 2;
    if (recvs[mid].first_seq <= seq) {
      low = mid;
    } else {
      high = mid;
    }
  }
  if (low == high || recvs[low].first_seq > seq) return nullptr;
  return &recvs[low];
}

/* Bytes of the i-th message of a piece. */
FL_FN uint64_t fl_message_bytes(uint64_t piece_bytes, uint64_t message_bytes, uint64_t i) {
  uint64_t begin = i * message_bytes;
  if (begin >= piece_bytes) return 0;
  uint64_t left = piece_bytes - begin;
  return left < message_bytes ? left : message_bytes;
}

FL_FN uint64_t fl_messages(uint64_t bytes, uint64_t message_bytes) {
  return bytes / message_bytes + (bytes % message_bytes != 0);
}

/* Chunks of all cells that stay in the server. */
FL_FN uint64_t fl_plan_local_chunks(const FlPlanHeader* t) {
  uint64_t chunks = 0;
  for (uint32_t i = 0; i < t->locals; ++i) chunks += fl_messages(fl_plan_locals(t)[i].bytes, t->message_bytes);
  return chunks;
}

#endif
