/* Linear layers on AMX, whose registers are tiles of up to 16 rows of 64 bytes. A tile product multiplies A (16 rows of
 * x) by B (16 outputs of a panel, packed just as layout.h draws them) and adds the result to C [rows, 16 outputs]:
 *
 *          C       A       B
 *   quant  0 .. 3  4 5     6 7     A: a plane of a group of x, int8 [rows][32]    B: its codes, 8 x [16][4]
 *   q6                             A: half of it               int8 [rows][16]    B: their half, 4 x [16][4]
 *   bf16   0 .. 2  3 4     5 .. 7  A: 32 inputs of x           bf16 [rows][32]    B: 32 inputs, 16 x [16][2]
 *
 * A tile product is said to take 16 cycles for 16 rows, with its result there after 52; loading a tile half a cycle for
 * each of its rows, storing one a whole cycle. Measured in one run on a Xeon, 2 threads, 8192 x 1536 from memory, 1, 16
 * and 32 rows: bf16 1.1, 1.1 and 1.5 ms (vectors 1.8, 3.5 and 5.2), q4 0.8, 1.5 and 2.5 ms (vectors 0.8, 2.7 and 4.9).
 *
 * A row of C depends on the same row of A alone, so that a row's bits do not depend on the others. */
#ifndef FD_LINEAR_AMX_H
#define FD_LINEAR_AMX_H

#include "linear_quant.h"

#define BF16_PANELS 3 /* panels that meet the same tiles of x */
#define BF16_STEP 32  /* inputs of one tile product */
#define MAX_TILE_ROWS 16

/* Where the activations of a row lie, split for bf16: for each 32 inputs the upper parts and then the lower ones. One
 * line more keeps neighbouring rows out of each other's way in the cache. In numbers of 16 bits. */
INLINE int64_t split_stride(int64_t inputs) { return round_up(inputs, BF16_STEP) * 2 + 32; }

/* The rows of each tile: as few tiles as possible, as even as possible. The last one begins early enough to be full,
 * and does some rows again: 17 rows are 0 .. 8 and 8 .. 16. */
INLINE int64_t num_tiles(int64_t rows) { return (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS; }
INLINE int rows_of_a_tile(int64_t rows) { return (int)((rows + num_tiles(rows) - 1) / num_tiles(rows)); }
INLINE int64_t tile_start(int64_t tile, int64_t rows) {
    int64_t next = tile * rows_of_a_tile(rows), last = rows - rows_of_a_tile(rows);
    return next < last ? next : last;
}

/* Quantised activations of one group and all rows of a tile. They lie side by side, group after group and then tile
 * after tile: a tile of A is neighbouring lines, and the factors of all rows are two more. */
typedef struct {
    float scales[MAX_TILE_ROWS], sums[MAX_TILE_ROWS];
    int8_t codes[]; /* [planes][rows][32] */
} tile_group;
#define TILE_GROUPS 16 /* of a panel that are widened at once: 10 KiB, beside as much of x */

INLINE int64_t tile_group_bytes(int planes, int rows) {
    return (int64_t)sizeof(tile_group) + round_up(planes * rows * GROUP, 64);
}
INLINE int64_t tiles_bytes(int64_t groups, int planes, int64_t rows) {
    return num_tiles(rows) * groups * tile_group_bytes(planes, rows_of_a_tile(rows));
}

/* Puts `groups` quantised groups of a row to its place among the `rows` rows of a tile, whose first of them is at `to`. */
static void lay_out(const x_group *x, int64_t groups, int planes, int64_t place, int rows, char *to) {
    for (; groups; groups--, x = next_x(x, planes), to += tile_group_bytes(planes, rows)) {
        tile_group *group = (tile_group *)to;
        group->scales[place] = x->scale;
        group->sums[place] = x->sum;
        FOR(plane, planes) memcpy(group->codes + (plane * rows + place) * GROUP, x->codes + plane * GROUP, GROUP);
    }
}

/* Sums of one tile of rows over some panels. */
typedef float bf16_sums[BF16_PANELS][MAX_TILE_ROWS * PANEL];

#if HAS_TILES

#define MIN_TILE_ROWS 9 /* of a tile: rows are shared out evenly */
/* Fewer rows than this are left to the vectors of linear_quant.h. On 16 threads of a Sapphire Rapids, a run of
 * Qwen2.5-Coder-1.5B takes 1.5 times as long for 9 rows in vectors as for one row and 1.65 in tiles, but 3.9 times for 32
 * in vectors and 3.4 in tiles; 16 rows take about the same in both. */
#define FEWEST_IN_TILES 17

/* Whether a linear layer runs in tiles. bf16 always does, because tiles add up in another order than vectors. */
INLINE int tiles_serve(int kind, int64_t rows) {
    return kind == FD_BF16 || (kind >= FD_Q8 && rows >= FEWEST_IN_TILES);
}

/* GCC's tile loads do not say that they read memory: what was written before them must be there. */
INLINE void finish_writes(const void *memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

/* The shapes of the tiles, from here to end_tiles: see the table above. */
static void begin_tiles(int kind, int64_t rows) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    int depth = kind == FD_BF16 ? 16 : scaling_of(kind) == HALVES ? 4 : 8; /* rows of B */
    for (int tile = 0; tile < 8; tile++) {
        int is_b = tile >= (kind == FD_BF16 ? 5 : 6), is_c = tile < (kind == FD_BF16 ? 3 : 4);
        shapes.row_bytes[tile] = (uint16_t)(is_b || is_c ? 64 : 4 * depth);
        shapes.rows[tile] = (uint8_t)(is_b ? depth : rows_of_a_tile(rows));
    }
    finish_writes(&shapes);
    _tile_loadconfig(&shapes);
}

static void end_tiles(void) { _tile_release(); }

/* The dot products of a unit and plane. A unit is what shares a scale: a group, or half a group of q6. The last few units
 * wait in TILE_BUFFERS of them, which are 4 KiB together: a processor takes a load for one of what is being stored 4 KiB
 * away, and waits. */
typedef int32_t tile_dots[MAX_TILE_ROWS][PANEL];
#define TILE_BUFFERS 4

/* Tile `c` = plane `plane` of a unit's x times its codes: exact integers. */
#define MULTIPLY_PLANE(c, a, b, plane)                                        \
    _tile_zero(c);                                                            \
    _tile_loadd(a, unit_x(x, unit, parts, plane, planes, rows), GROUP);       \
    _tile_dpbssd(c, a, b);
/* One unit through tiles c, or c and `high`, and b; then the tiles of the unit before the last, or with two planes of
 * the last, are stored: its products have had the time to arrive, and no tile is filled again before that. */
#define UNIT_OF_ONE(c, a, b, stored)                                                                        \
    if (unit < units) {                                                                                     \
        _tile_loadd(b, unit_codes(panel, unit, parts), 4 * PANEL);                                          \
        MULTIPLY_PLANE(c, a, b, 0)                                                                          \
    }                                                                                                       \
    if (unit >= 2 && unit < units + 2) _tile_stored(stored, dots[(unit - 2) % TILE_BUFFERS], 4 * PANEL);
#define UNIT_OF_TWO(c, high, b, stored, stored_high)                                                        \
    if (unit < units) {                                                                                     \
        _tile_loadd(b, unit_codes(panel, unit, parts), 4 * PANEL);                                          \
        MULTIPLY_PLANE(c, 4, b, 0)                                                                          \
        MULTIPLY_PLANE(high, 5, b, 1)                                                                       \
    }                                                                                                       \
    if (unit >= 1 && unit < units + 1) {                                                                    \
        _tile_stored(stored, dots[(unit - 1) * 2 % TILE_BUFFERS], 4 * PANEL);                               \
        _tile_stored(stored_high, dots[(unit - 1) * 2 % TILE_BUFFERS + 1], 4 * PANEL);                      \
    }
INLINE const int8_t *unit_x(const char *x, int64_t unit, int parts, int plane, int planes, int rows) {
    const tile_group *group = (const tile_group *)(x + unit / parts * tile_group_bytes(planes, rows));
    return group->codes + plane * rows * GROUP + unit % parts * GROUP / 2;
}
INLINE const int8_t *unit_codes(const wide_panel *panel, int64_t unit, int parts) {
    return panel->codes + unit / parts * panel->code_bytes + unit % parts * GROUP_CODES / 2;
}

/* acc += the dot products of a unit, with the operations of add_dots in their order. */
INLINE void fold_unit(const wide_panel *panel, enum scaling scaling, const char *x, int64_t unit, tile_dots *dots,
                      int planes, int rows, vf acc[][PANEL_VECS]) {
    int parts = scaling == HALVES ? 2 : 1;
    int64_t group = unit / parts;
    const tile_group *of = (const tile_group *)(x + group * tile_group_bytes(planes, rows));
    FOR(v, PANEL_VECS) {
        const float *from = panel->factors + group * 2 * PANEL + v * LANES;
        vf scales = load(from + unit % parts * PANEL), minimums = load(from + PANEL);
        FOR(r, rows) {
            vi dot = (vi)load(&dots[0][r][v * LANES]);
            if (planes == 2) dot += (vi)((vu)load(&dots[1][r][v * LANES]) << 8);
            acc[r][v] = muladd(acc[r][v], scales * of->scales[r], to_float(dot));
            if (scaling == MINIMUM) acc[r][v] = muladd(acc[r][v], minimums, splat(of->sums[r]));
        }
    }
}

/* One tile of `rows` rows over some groups of a panel: y = the sums so far, where these are not the first groups, and
 * theirs. The first tile also asks for the next panel.
 *
 * A group of one plane, 16 rows and 16 outputs: a tile product and 24 rows of tiles to load 7 ns, 16 rows to store 5 ns,
 * 16 x 3 vector operations to fold 9 ns, with minimums 16 x 4 12 ns, measured one by one on a Xeon at 2.9 GHz. Vectors
 * alone take 8 vpdpbusd a row more, 44 ns, and are as quick for 8 rows. */
INLINE void quant_tiles(const wide_panel *panel, enum scaling scaling, const char *x, float *y, int is_first_tile,
                        int are_first_groups, int planes, int rows) {
    _Alignas(4096) tile_dots dots[TILE_BUFFERS];
    int delay = planes == 1 ? 3 : 2; /* from a unit's products to its fold, see UNIT_OF_ONE */
    int parts = scaling == HALVES ? 2 : 1;
    int64_t units = panel->groups * parts;
    vf acc[MAX_TILE_ROWS][PANEL_VECS];
    FOR(r, rows)
        FOR(v, PANEL_VECS) acc[r][v] = are_first_groups ? (vf){0} : load(y + r * PANEL + v * LANES);
    for (int64_t unit = 0; unit < units + delay; unit++) {
        if (is_first_tile && unit < panel->groups) prefetch_next(panel, unit);
        if (planes == 2) {
            if (unit % 2) { UNIT_OF_TWO(2, 3, 7, 0, 1) }
            else { UNIT_OF_TWO(0, 1, 6, 2, 3) }
        } else if (unit % 4 == 0) { UNIT_OF_ONE(0, 4, 6, 2) }
        else if (unit % 4 == 1) { UNIT_OF_ONE(1, 5, 7, 3) }
        else if (unit % 4 == 2) { UNIT_OF_ONE(2, 4, 6, 0) }
        else { UNIT_OF_ONE(3, 5, 7, 1) }
        finish_writes(dots);
        int64_t done = unit - delay;
        if (done >= 0) fold_unit(panel, scaling, x, done, dots + done * planes % TILE_BUFFERS, planes, rows, acc);
    }
    FOR(r, rows)
        FOR(v, PANEL_VECS) store(y + r * PANEL + v * LANES, acc[r][v]);
}
#undef MULTIPLY_PLANE
#undef UNIT_OF_ONE
#undef UNIT_OF_TWO

typedef void tile_kernel(const wide_panel *panel, const char *x, float *y, int is_first_tile, int are_first_groups);

#define QUANT_TILE(rows, name, scaling, planes)                                                                 \
    KERNEL void name##_##rows(const wide_panel *panel, const char *x, float *y, int is_first_tile,              \
                              int are_first_groups) {                                                           \
        quant_tiles(panel, scaling, x, y, is_first_tile, are_first_groups, planes, rows);                       \
    }
#define QUANT_TILES(name, scaling, planes)                                                               \
    QUANT_TILE(9, name, scaling, planes) QUANT_TILE(10, name, scaling, planes)                           \
    QUANT_TILE(11, name, scaling, planes) QUANT_TILE(12, name, scaling, planes)                          \
    QUANT_TILE(13, name, scaling, planes) QUANT_TILE(14, name, scaling, planes)                          \
    QUANT_TILE(15, name, scaling, planes) QUANT_TILE(16, name, scaling, planes)                          \
    static tile_kernel *const name[] = {name##_9,  name##_10, name##_11, name##_12,                      \
                                        name##_13, name##_14, name##_15, name##_16};
QUANT_TILES(scale_tiles_one, SCALE, 1)
QUANT_TILES(minimum_tiles_one, MINIMUM, 1)
QUANT_TILES(halves_tiles_one, HALVES, 1)
QUANT_TILES(scale_tiles_two, SCALE, 2)
QUANT_TILES(minimum_tiles_two, MINIMUM, 2)
QUANT_TILES(halves_tiles_two, HALVES, 2)

/* All tiles of `rows` rows over one panel; x as laid out by lay_out, y [tiles, rows of a tile, 16]. The panel is
 * widened some groups at a time, which stay in the first-level cache together with their x. */
static void quant_panel_in_tiles(int kind, const void *panel, int64_t groups, const char *x, int planes, int64_t rows,
                                 float *y, void *scratch) {
    static tile_kernel *const *const tiles[2][3] = {
        {[SCALE] = scale_tiles_one, [MINIMUM] = minimum_tiles_one, [HALVES] = halves_tiles_one},
        {[SCALE] = scale_tiles_two, [MINIMUM] = minimum_tiles_two, [HALVES] = halves_tiles_two},
    };
    int count = rows_of_a_tile(rows);
    int64_t group_bytes = tile_group_bytes(planes, count);
    tile_kernel *chosen = tiles[planes - 1][scaling_of(kind)][count - MIN_TILE_ROWS];
    for (int64_t first = 0; first < groups; first += TILE_GROUPS) {
        int64_t some = groups - first < TILE_GROUPS ? groups - first : TILE_GROUPS;
        wide_panel wide = widen_any(kind, panel, groups, first, some, scratch);
        finish_writes(wide.codes);
        for (int64_t tile = 0; tile < num_tiles(rows); tile++)
            chosen(&wide, x + (tile * groups + first) * group_bytes, y + tile * count * PANEL, tile == 0, first == 0);
    }
}

/* To the nearest bfloat16, in the upper half of each lane; ties to even. Numbers that would become infinite are cut off
 * instead, and NaN stays NaN. */
INLINE vu rounded_bf16(vf x) {
    vu bits = (vu)x, size = bits & 0x7fffffff;
    vu rounded = bits + 0x7fff + ((bits >> 16) & 1);
    rounded = (vu)pick(size >= 0x7f7f8000, (vf)bits, (vf)rounded);
    return (vu)pick(size > 0x7f800000, (vf)(bits | 0x400000), (vf)rounded) & 0xffff0000;
}

/* A row of x as two bfloat16, x = upper + lower to 2**-17 of x; padded with zeros. What is not finite has no lower
 * part, so that an infinity stays one. */
static void split_row(const float *x, int64_t inputs, uint16_t *out) {
    for (int64_t k = 0; k < inputs; k += BF16_STEP, out += 2 * BF16_STEP) {
        const float *from = x + k;
        float rest[BF16_STEP];
        if (inputs - k < BF16_STEP) {
            memset(rest, 0, sizeof rest);
            from = memcpy(rest, from, 4 * (size_t)(inputs - k));
        }
        FOR_STEP(i, BF16_STEP, LANES) {
            vf all = load(from + i);
            vu upper = rounded_bf16(all);
            vi finite = ((vu)all & 0x7fffffff) < 0x7f800000;
            vu lower = rounded_bf16(pick(finite, all - (vf)upper, splat(0)));
            store_upper_halves(out + i, upper);
            store_upper_halves(out + BF16_STEP + i, lower);
        }
    }
}

/* 32 inputs of `panels` panels (a literal), whose weights begin at w[panel]: x.upper first, then x.lower. */
INLINE void bf16_step(const char *const w[], int panels, const uint16_t *x, int64_t x_stride) {
    _tile_loadd(3, x, 2 * x_stride);
    _tile_loadd(4, x + BF16_STEP, 2 * x_stride);
    _tile_loadd(5, w[0], 4 * PANEL);
    _tile_dpbf16ps(0, 3, 5);
    if (panels > 1) {
        _tile_loadd(6, w[1], 4 * PANEL);
        _tile_dpbf16ps(1, 3, 6);
    }
    if (panels > 2) {
        _tile_loadd(7, w[2], 4 * PANEL);
        _tile_dpbf16ps(2, 3, 7);
    }
    _tile_dpbf16ps(0, 4, 5);
    if (panels > 1) _tile_dpbf16ps(1, 4, 6);
    if (panels > 2) _tile_dpbf16ps(2, 4, 7);
}

/* One tile of rows over `panels` panels, `panel_stride` bytes apart. Each sum waits twice 52 cycles for itself in a
 * step; the products of three panels fill 96 of these 104. Three panels of 32 inputs are 3072 bytes, which a core does
 * not get from memory in that time, so one row costs what reading the weights does. The lines of a step are asked for
 * three steps ahead. 16 rows load 80 rows of tiles (40 cycles) besides. */
INLINE void bf16_tiles(const char *weights, int64_t panel_stride, int panels, int64_t inputs, const uint16_t *x,
                       bf16_sums sums) {
    const int step_bytes = BF16_STEP * PANEL * 2;
    int64_t steps = inputs / BF16_STEP, stride = split_stride(inputs);
    const char *w[BF16_PANELS];
    FOR(p, panels) w[p] = weights + p * panel_stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (int64_t step = 0; step < steps; step++, x += 2 * BF16_STEP) {
        FOR(p, panels)
            FOR_STEP(line, step_bytes, 64) __builtin_prefetch(w[p] + 3 * step_bytes + line);
        bf16_step(w, panels, x, stride);
        FOR(p, panels) w[p] += step_bytes;
    }
    if (inputs % BF16_STEP) { /* the rest, padded with zeros */
        _Alignas(64) char rest[BF16_PANELS][BF16_STEP * PANEL * 2] = {{0}};
        FOR(p, panels) {
            memcpy(rest[p], w[p], (size_t)(round_up(inputs % BF16_STEP, 4) * PANEL * 2));
            w[p] = rest[p];
        }
        finish_writes(rest);
        bf16_step(w, panels, x, stride);
    }
    _tile_stored(0, sums[0], 4 * PANEL);
    if (panels > 1) _tile_stored(1, sums[1], 4 * PANEL);
    if (panels > 2) _tile_stored(2, sums[2], 4 * PANEL);
}

#define BF16_TILES(panels)                                                                                        \
    KERNEL void bf16_tiles_##panels(const char *weights, int64_t panel_stride, int64_t inputs, const uint16_t *x, \
                                    bf16_sums sums) {                                                             \
        bf16_tiles(weights, panel_stride, panels, inputs, x, sums);                                               \
    }
BF16_TILES(1) BF16_TILES(2) BF16_TILES(3)

/* One tile of rows over 1 to 3 panels. */
static void bf16_rows_in_tiles(const char *weights, int64_t panel_stride, int64_t panels, int64_t inputs,
                               const uint16_t *x, bf16_sums sums) {
    if (panels == 1) bf16_tiles_1(weights, panel_stride, inputs, x, sums);
    else if (panels == 2) bf16_tiles_2(weights, panel_stride, inputs, x, sums);
    else bf16_tiles_3(weights, panel_stride, inputs, x, sums);
}

#else

/* Without tiles none of these is called. */
#define UNUSED __attribute__((unused))
INLINE int tiles_serve(UNUSED int kind, UNUSED int64_t rows) { return 0; }
INLINE void begin_tiles(UNUSED int kind, UNUSED int64_t rows) {}
INLINE void end_tiles(void) {}
INLINE void quant_panel_in_tiles(UNUSED int kind, UNUSED const void *panel, UNUSED int64_t groups, UNUSED const char *x,
                                 UNUSED int planes, UNUSED int64_t rows, UNUSED float *y, UNUSED void *scratch) {}
INLINE void split_row(UNUSED const float *x, UNUSED int64_t inputs, UNUSED uint16_t *out) {}
INLINE void bf16_rows_in_tiles(UNUSED const char *weights, UNUSED int64_t panel_stride, UNUSED int64_t panels,
                               UNUSED int64_t inputs, UNUSED const uint16_t *x, UNUSED bf16_sums sums) {}

#endif
#endif
