/* Tiles that are made in shared memory leave by the bulk copy engine (TMA) and are read back by it at the other end.
 * docs/tutorial/fused-kernels.md goes through it. */

#include <fuselink/device.cuh>

#define TILE_VALUES 1024

/* One message; its size is a multiple of 16. */
struct BulkTile {
  uint32_t tile;
  uint32_t reserved[3];
  float value[TILE_VALUES];
};

struct BulkPut {
  FlStream stream;
  uint64_t owner_of_ptr; /* uint32_t[tiles]: the rank that each tile is for */
  uint32_t tiles;
  uint32_t first; /* what tile 0 starts from */
};

FL_KERNEL(tutorial_bulk_put, BulkPut) {
  FlBlockScope block;
  FL_SHARED alignas(128) BulkTile tile;
  for (uint32_t t = fl_block_idx(); t < p->tiles; t += fl_block_count()) {
    uint32_t owner = fl_at<const uint32_t>(p->owner_of_ptr)[t];
    FlSlot slot = fl_wait_slot(block, &p->stream, owner);
    if (slot.addr == 0) return; /* the host says why */

    for (uint32_t i = fl_thread_idx(); i < TILE_VALUES; i += fl_thread_count()) {
      tile.value[i] = (float)(p->first + t + i % 7);
    }
    if (fl_elected(block)) tile.tile = t;

    /* From shared memory to the slot; what the block computes meanwhile costs nothing. */
    fl_bulk_store(block, slot.addr, &tile, sizeof(BulkTile));
    fl_bulk_finish(block);
    if (!fl_send_with_signal(block, &p->stream, owner, slot, sizeof(BulkTile), fl_add_to(0, 1))) return;
  }
}

struct BulkSums {
  FlStream stream;
  uint64_t sums_ptr; /* float[tiles of the source] */
  uint32_t source;
  uint32_t tiles; /* for this rank */
};

FL_KERNEL(tutorial_bulk_sums, BulkSums) {
  FlBlockScope block;
  FL_SHARED alignas(128) BulkTile tile;
  FL_SHARED uint64_t barrier;
  FlBulkLoad load = fl_bulk_loader(block, &barrier);
  for (uint32_t n = fl_block_idx(); n < p->tiles; n += fl_block_count()) {
    FlMessage message = fl_wait_message(block, &p->stream, p->source);
    if (message.addr == 0) return;

    /* Once it is in shared memory the slot can go back. */
    fl_bulk_load(block, &load, &tile, message.addr, sizeof(BulkTile));
    fl_bulk_await(block, &load);
    if (!fl_give_back(block, &p->stream, message)) return;

    if (fl_elected(block)) {
      float sum = 0;
      for (uint32_t i = 0; i < TILE_VALUES; ++i) sum += tile.value[i];
      fl_at<float>(p->sums_ptr)[tile.tile] = sum;
    }
  }
}
