/* A matrix product whose result leaves while it is computed, and its consumer, which reads it where it arrived.
 * docs/tutorial/fused-kernels.md goes through it. */

#include <fuselink/device.cuh>

#define TILE 32

/* C = A * B, row-major, sides a multiple of TILE. The rows of C are dealt to `owners` ranks, as many rows of tiles each. */
struct GemmPut {
  FlStream stream;
  uint64_t a_ptr; /* float[rows][inner] */
  uint64_t b_ptr; /* float[inner][columns] */
  uint32_t rows;
  uint32_t inner;
  uint32_t columns;
  uint32_t owners;
  uint64_t owners_ptr; /* uint32_t[owners] */
};

/* One message: a tile, and which it is. */
struct TileMessage {
  uint32_t tile_row;
  uint32_t tile_column;
  uint32_t reserved[14]; /* the values start on a line of their own */
  float value[TILE][TILE];
};

FL_FN float dot(const float* a, const float* b, uint32_t inner, uint32_t columns) {
  float sum = 0;
  for (uint32_t k = 0; k < inner; ++k) sum += a[k] * b[(uint64_t)k * columns];
  return sum;
}

FL_KERNEL(tutorial_gemm_put, GemmPut) {
  FlBlockScope block;
  uint32_t tile_rows = p->rows / TILE, tile_columns = p->columns / TILE;
  const float* a = fl_at<const float>(p->a_ptr);
  const float* b = fl_at<const float>(p->b_ptr);
  for (uint32_t tile = fl_block_idx(); tile < tile_rows * tile_columns; tile += fl_block_count()) {
    uint32_t tile_row = tile / tile_columns, tile_column = tile % tile_columns;
    uint32_t owner = fl_at<const uint32_t>(p->owners_ptr)[tile_row / (tile_rows / p->owners)];

    /* The slot is claimed before the tile is computed: by the time the epilogue runs it is there. */
    FlSlot slot = fl_wait_slot(block, &p->stream, owner);
    if (slot.addr == 0) return; /* the host says why */
    TileMessage* message = fl_at<TileMessage>(slot.addr);

    /* The epilogue: results go from registers into the slot, beside the NIC by which they will leave. */
    for (uint32_t i = fl_thread_idx(); i < TILE * TILE; i += fl_thread_count()) {
      uint32_t row = i / TILE, column = i % TILE;
      message->value[row][column] = dot(a + (uint64_t)(tile_row * TILE + row) * p->inner,
                                        b + tile_column * TILE + column, p->inner, p->columns);
    }
    if (fl_elected(block)) {
      message->tile_row = tile_row;
      message->tile_column = tile_column;
    }
    if (!fl_send_with_signal(block, &p->stream, owner, slot, sizeof(TileMessage), fl_add_to(0, 1))) return;
  }
}

/* Adds up each row of C as its tiles come in. */
struct RowSums {
  FlStream stream;
  uint64_t sources_ptr; /* uint32_t[sources] */
  uint32_t sources;
  uint32_t tiles;        /* from each */
  uint64_t row_sums_ptr; /* float[sources][rows of C] */
  uint32_t rows;
  uint32_t reserved;
};

FL_KERNEL(tutorial_row_sums, RowSums) {
  FlBlockScope block;
  for (uint32_t i = fl_block_idx(); i < p->sources; i += fl_block_count()) {
    float* row_sums = fl_at<float>(p->row_sums_ptr) + (uint64_t)i * p->rows;
    for (uint32_t n = 0; n < p->tiles; ++n) {
      FlMessage message = fl_wait_message(block, &p->stream, fl_at<const uint32_t>(p->sources_ptr)[i]);
      if (message.addr == 0) return;

      /* Read where it lies: nothing is copied. */
      const TileMessage* tile = fl_at<const TileMessage>(message.addr);
      for (uint32_t row = fl_thread_idx(); row < TILE; row += fl_thread_count()) {
        float sum = 0;
        for (uint32_t column = 0; column < TILE; ++column) sum += tile->value[row][column];
        row_sums[tile->tile_row * TILE + row] += sum;
      }

      /* From here on the slot is the next message's. */
      if (!fl_give_back(block, &p->stream, message)) return;
    }
  }
}

/* A token for each expert that wants it, by one warp each: many small messages, no block waits for another's. */
struct DispatchTokens {
  FlStream stream;
  uint64_t tokens_ptr; /* tokens * token_bytes */
  uint64_t token_bytes;
  uint64_t expert_of_ptr; /* uint32_t[tokens]: the rank where its expert is */
  uint32_t tokens;
  uint32_t reserved;
};

FL_KERNEL(tutorial_dispatch, DispatchTokens) {
  FlWarpScope warp;
  uint32_t warps = fl_block_count() * fl_warp_count();
  for (uint32_t t = fl_block_idx() * fl_warp_count() + fl_warp_idx(); t < p->tokens; t += warps) {
    uint32_t rank = fl_at<const uint32_t>(p->expert_of_ptr)[t];
    uint64_t token = p->tokens_ptr + t * p->token_bytes;
    if (!fl_put_with_signal(warp, &p->stream, rank, token, p->token_bytes, fl_add_to(1, 1))) return;
  }
}
