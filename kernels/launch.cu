/* What is defined once for all kernels. */

#include "simt.h"

#ifndef __CUDACC__
thread_local const FlBlock* fl_this_block = nullptr;

/* Sizes and offsets as this compiler sees them, for the test that compares them with host/abi.rs. */
#include <stddef.h>
#define FL_LAYOUT(type, last) sizeof(type), offsetof(type, last)
extern "C" const uint64_t fl_abi_layout[] = {
    FL_LAYOUT(FlDoorbell, word),       FL_LAYOUT(FlRing, capacity),          FL_LAYOUT(FlArmedSlot, message),
    FL_LAYOUT(FlArrival, slot),        FL_LAYOUT(FlLocalArrival, bytes),     FL_LAYOUT(FlLocalSend, value),
    FL_LAYOUT(FlLocalEnd, reserved),   FL_LAYOUT(FlCreditLine, ring),        FL_LAYOUT(FlSignalEntry, value),
    FL_LAYOUT(FlPlanHeader, table_bytes),
    FL_LAYOUT(FlPlanLane, messages),   FL_LAYOUT(FlPlanSend, ingress),       FL_LAYOUT(FlPlanRecv, ingress),
    FL_LAYOUT(FlPlanLocal, reserved),  FL_LAYOUT(FlPlanTurn, bytes),         FL_LAYOUT(FlChannel, status_ptr),
    FL_LAYOUT(FlPeerFlags, done),      FL_LAYOUT(FlStatus, detail),          FL_LAYOUT(FlAllToAll, local_done),
    FL_LAYOUT(FlStream, local_depth),     FL_LAYOUT(FlPut, moved),
};
extern "C" const uint64_t fl_abi_layout_len = sizeof(fl_abi_layout) / sizeof(fl_abi_layout[0]);
#endif
