/* Whole draft trees in one call. proposers/model/tree.py has the rule by which they grow and does the same level by level:
 * equal logits give equal drafts, to the last bit of a score. */
#include "layers.h"

#include <stdlib.h>
#include <string.h>

#define LEAST_PROBABILITY 0x1p-20 /* as in backends/tree_ops.py */

/* A node that is run, or a candidate behind one that is not. */
typedef struct {
    int64_t token;
    int32_t parent; /* a node; -1: the end of the sequence */
    double score, weight;
} tree_node;

typedef struct {
    const fd_growth *growth;
    const fd_drawing *drawings; /* [depth] */
    int64_t length, budget; /* tokens of the sequence, nodes of the draft */
    int32_t size, num_run, depth, num_leaves, ended;
    tree_node nodes[FD_NODES];
    tree_node *leaves, *branches;
} tree;

/* What the runs of a call need: rows of the largest one, and what they leave. */
typedef struct {
    int64_t *token_ids, *positions, *slots;
    int32_t *sequences, *prefix_lens, *paths, *path_lens;
    float *tapped, *x, *normed, *logits, *shares;
    int64_t *columns;
    fd_drawing *drawings;
} workspace;

/* The least weight in the draft, or what is worth going on from, with `count` branches beside what the tree has. */
static double least_weight(const tree *tree, int64_t count) {
    const tree_node *groups[] = {tree->nodes, tree->leaves, tree->branches};
    const int64_t sizes[] = {tree->size, tree->num_leaves, count};
    double best[FD_NODES]; /* descending */
    int64_t found = 0;
    for (int group = 0; group < 3; group++)
        for (int64_t i = 0; i < sizes[group]; i++) {
            double weight = groups[group][i].weight;
            if (found == tree->budget && weight <= best[found - 1]) continue;
            int64_t at = found < tree->budget ? found++ : found - 1;
            for (; at && best[at - 1] < weight; at--) best[at] = best[at - 1];
            best[at] = weight;
        }
    double least = found == tree->budget ? best[found - 1] : 0;
    return least > tree->growth->min_score ? least : tree->growth->min_score;
}

static int64_t room(const tree *tree) { return tree->growth->depth * tree->growth->width - tree->size; }

/* Whether nodes that were not run yet are worth it. */
static int grows(const tree *tree) {
    if (!tree->budget || tree->ended || tree->depth >= tree->growth->depth || room(tree) < 1) return 0;
    double least = least_weight(tree, 0);
    for (int32_t node = tree->num_run; node < tree->size; node++)
        if (tree->nodes[node].weight > least) return 1;
    return 0;
}

/* The best of what may follow: `rows` rows of candidates, behind the end of the sequence or the nodes from `first` on. */
static void add_best(tree *tree, int32_t first, int64_t rows, const float *shares, const int64_t *columns,
                     const int64_t *token_ids) {
    const fd_growth *growth = tree->growth;
    int64_t count = 0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t rank = 0; rank < growth->width; rank++) {
            int64_t candidate = row * growth->width + rank;
            if (shares[candidate] == 0) continue;
            const tree_node *above = first < 0 ? NULL : &tree->nodes[first + row];
            double share = shares[candidate] > LEAST_PROBABILITY ? shares[candidate] : LEAST_PROBABILITY;
            double score = (share < 1 ? share : 1) * (above ? above->score : 1);
            double weight = growth->shares ? growth->shares[rank] * (above ? above->weight : 1) : score;
            int64_t at = count++;
            for (; at && tree->branches[at - 1].weight < weight; at--) tree->branches[at] = tree->branches[at - 1];
            tree->branches[at] =
                (tree_node){token_ids[columns[candidate]], first < 0 ? -1 : first + (int32_t)row, score, weight};
        }
    double least = least_weight(tree, count);
    int64_t most = growth->width < room(tree) ? growth->width : room(tree), added = 0;
    for (; added < count && added < most && tree->branches[added].weight > least; added++)
        tree->nodes[tree->size++] = tree->branches[added];
    for (int64_t i = added; i < count; i++) tree->leaves[tree->num_leaves++] = tree->branches[i];
    tree->depth++;
    tree->ended = !added;
}

static const tree_node *found(const tree *tree, int32_t place) {
    return place < tree->size ? &tree->nodes[place] : &tree->leaves[place - tree->size];
}

/* The best nodes and leaves, as many as the draft may have: nodes in order, then leaves, the best first. Where all of them
 * fit, leaves come as they were found. Returns how many there are. */
static int32_t choose(const tree *tree, fd_nodes *draft) {
    int32_t total = tree->size + tree->num_leaves, best[FD_NODES], order[FD_NODES], places[FD_NODES];
    int32_t kept = 0, count = 0;
    int fits = total <= tree->budget;
    for (int32_t i = 0; i < total && tree->budget; i++) {
        double weight = found(tree, i)->weight;
        if (kept == tree->budget && weight <= found(tree, best[kept - 1])->weight) continue;
        int32_t at = kept < tree->budget ? kept++ : kept - 1;
        for (; !fits && at && found(tree, best[at - 1])->weight < weight; at--) best[at] = best[at - 1];
        best[at] = i;
    }
    for (int32_t node = 0; node < tree->size; node++)
        for (int32_t rank = 0; rank < kept; rank++)
            if (best[rank] == node) places[node] = count, order[count++] = node;
    for (int32_t rank = 0; rank < kept; rank++)
        if (best[rank] >= tree->size) order[count++] = best[rank];
    for (int32_t i = 0; i < count; i++) {
        const tree_node *node = found(tree, order[i]);
        draft->tokens[i] = (int32_t)node->token;
        draft->parents[i] = node->parent < 0 ? -1 : places[node->parent];
        draft->scores[i] = node->score;
    }
    return count;
}

/* The rows of all nodes that are still to be run. Node i lies at the i-th place behind the tokens of its sequence. */
static fd_batch lay_out(tree *trees, const fd_batch *first, const workspace *to) {
    int64_t rows = 0, deepest = 0, size = first->block_size;
    for (int64_t s = 0; s < first->num_sequences; s++)
        if (grows(&trees[s]) && trees[s].depth > deepest) deepest = trees[s].depth;
    for (int64_t s = 0; s < first->num_sequences; s++) {
        tree *tree = &trees[s];
        if (!grows(tree)) continue;
        for (int32_t node = tree->num_run; node < tree->size; node++, rows++) {
            int64_t offset = tree->length + node, block = offset / size, depth = tree->depth;
            to->token_ids[rows] = tree->nodes[node].token;
            to->positions[rows] = tree->length + depth - 1;
            to->slots[rows] = first->block_tables[s * first->table_width + block] * size + offset % size;
            to->sequences[rows] = (int32_t)s;
            to->prefix_lens[rows] = (int32_t)tree->length;
            to->path_lens[rows] = (int32_t)depth;
            for (int32_t above = node; above >= 0; above = tree->nodes[above].parent)
                to->paths[rows * deepest + --depth] = (int32_t)tree->length + above;
        }
    }
    return (fd_batch){to->token_ids, to->positions, to->slots, to->sequences, first->block_tables, to->prefix_lens,
                      to->paths, to->path_lens, rows, first->num_sequences, first->table_width, deepest, size};
}

/* The likeliest tokens behind rows that have gone through the layers, of which `to->drawings` says all but the logits. */
static int find(const fd_taps_head *head, const float *normed, int64_t rows, int64_t width, const workspace *to) {
    int64_t columns = head->output->outputs;
    int error = project(head->output, normed, rows, to->logits);
    for (int64_t row = 0; row < rows; row++) to->drawings[row].logits = to->logits + row * columns;
    return error ? error
                 : fd_likely(to->drawings, head->token_ids, 0, rows, columns, width, to->shares, to->columns);
}

/* The tokens of the sequences that were not run yet, and the candidates behind the last one of each. */
static int begin(const fd_taps_head *head, const fd_batch *first, int64_t width, const tree *trees,
                 const workspace *to) {
    int64_t inner = head->stack->width;
    int error = fd_read_previous(head->taps, head->parts, head->num_parts, first, to->tapped);
    if (!error) error = project(head->fusion, to->tapped, first->rows, to->x);
    if (!error) error = fd_run_layers(head->stack, head->kv, first, NULL, 0, head->kept, to->x, to->normed);
    if (error) return error;
    for (int64_t row = 0; row < first->rows; row++) /* the rows of a sequence come in order: its last one stays */
        memcpy(to->x + first->sequences[row] * inner, to->normed + row * inner, 4 * (size_t)inner);
    for (int64_t s = 0; s < first->num_sequences; s++) to->drawings[s] = trees[s].drawings[0];
    return find(head, to->x, first->num_sequences, width, to);
}

static int run_level(const fd_taps_head *head, const fd_batch *level, int64_t width, const tree *trees,
                     const workspace *to) {
    for (int64_t row = 0; row < level->rows; row++)
        to->drawings[row] = trees[level->sequences[row]].drawings[level->path_lens[row]];
    int error = fd_read_previous(head->outputs, NULL, 1, level, to->x);
    if (!error) error = fd_run_layers(head->stack, head->kv, level, NULL, 0, head->kept, to->x, to->normed);
    return error ? error : find(head, to->normed, level->rows, width, to);
}

static int grow_all(const fd_taps_head *head, const fd_batch *first, const fd_growth *growth, tree *trees,
                    const workspace *to) {
    int64_t width = growth->width;
    int error = begin(head, first, width, trees, to);
    for (int64_t s = 0; s < first->num_sequences && !error; s++)
        if (trees[s].budget)
            add_best(&trees[s], -1, 1, to->shares + s * width, to->columns + s * width, head->token_ids);
    while (!error) {
        fd_batch level = lay_out(trees, first, to);
        if (!level.rows) break;
        error = run_level(head, &level, width, trees, to);
        for (int64_t row = 0; row < level.rows && !error;) {
            tree *tree = &trees[level.sequences[row]];
            int32_t before = tree->num_run, count = tree->size - before;
            tree->num_run = tree->size;
            add_best(tree, before, count, to->shares + row * width, to->columns + row * width, head->token_ids);
            row += count;
        }
    }
    return error;
}

static int check(const fd_taps_head *head, const fd_batch *first, const fd_growth *growth, const int64_t *lengths,
                 const int64_t *budgets) {
    if (!head->taps || !head->fusion || !head->stack || !head->kv || !head->kept || !head->outputs || !head->output ||
        !head->token_ids || !first->sequences || !first->block_tables)
        return FD_NULL;
    int64_t most = growth->depth * growth->width, width = head->stack->width;
    if (growth->depth < 1 || growth->width < 1 || growth->depth > FD_NODES || most > FD_NODES) return FD_SHAPE;
    if (first->rows < 1 || first->num_sequences < 1 || first->num_sequences > first->rows || first->block_size < 1)
        return FD_SHAPE;
    if (head->num_parts < 1 || head->outputs->parts != 1 || head->outputs->width != width) return FD_SHAPE;
    for (int64_t row = 0; row < first->rows; row++)
        if (first->sequences[row] < 0 || first->sequences[row] >= first->num_sequences) return FD_RANGE;
    for (int64_t s = 0; s < first->num_sequences; s++) {
        if (lengths[s] < 1 || budgets[s] < 0 || budgets[s] > FD_NODES) return FD_SHAPE;
        if (lengths[s] > first->table_width * first->block_size - most) return FD_RANGE;
    }
    int error = check_projection(head->fusion, width, head->num_parts * head->taps->width);
    return error ? error : check_projection(head->output, head->output->outputs, width);
}

int fd_grow_trees(const fd_taps_head *head, const fd_batch *first, const fd_growth *growth, const int64_t *lengths,
                  const int64_t *budgets, const fd_drawing *drawings, fd_nodes *drafts, int32_t *counts) {
    if (!head || !first || !growth || !lengths || !budgets || !drawings || !drafts || !counts) return FD_NULL;
    int error = check(head, first, growth, lengths, budgets);
    if (error) return error;
    int64_t sequences = first->num_sequences, depth = growth->depth, width = growth->width;
    int64_t of_level = sequences * width, rows = first->rows > of_level ? first->rows : of_level;
    int64_t most_leaves = (1 + depth * width) * width, most_branches = width * width;
    int64_t inner = head->stack->width, tapped = head->num_parts * head->taps->width;
    size_t floats = (size_t)(first->rows * tapped + 2 * rows * inner + of_level * (head->output->outputs + width));
    size_t bytes[] = {
        sequences * sizeof(tree),
        sequences * (size_t)(most_leaves + most_branches) * sizeof(tree_node),
        8 * (size_t)(of_level * (3 + width)),
        of_level * sizeof(fd_drawing),
        4 * floats,
        4 * (size_t)(of_level * (3 + depth)),
    };
    size_t all = 0;
    for (int i = 0; i < 6; i++) all += bytes[i] = (bytes[i] + 63) / 64 * 64;
    char *memory = aligned_alloc(64, all);
    if (!memory) return FD_NO_MEMORY;
    tree *trees = (tree *)memory;
    tree_node *candidates = (tree_node *)(memory + bytes[0]);
    int64_t *wide = (int64_t *)((char *)candidates + bytes[1]);
    fd_drawing *of_rows = (fd_drawing *)((char *)wide + bytes[2]);
    float *numbers = (float *)((char *)of_rows + bytes[3]);
    int32_t *narrow = (int32_t *)((char *)numbers + bytes[4]);
    float *x = numbers + first->rows * tapped, *logits = x + 2 * rows * inner;
    workspace to = {
        .token_ids = wide,
        .positions = wide + of_level,
        .slots = wide + 2 * of_level,
        .columns = wide + 3 * of_level,
        .drawings = of_rows,
        .tapped = numbers,
        .x = x,
        .normed = x + rows * inner,
        .logits = logits,
        .shares = logits + of_level * head->output->outputs,
        .sequences = narrow,
        .prefix_lens = narrow + of_level,
        .path_lens = narrow + 2 * of_level,
        .paths = narrow + 3 * of_level,
    };
    for (int64_t s = 0; s < sequences; s++) {
        trees[s] = (tree){.growth = growth, .length = lengths[s], .budget = budgets[s]};
        trees[s].drawings = drawings + s * depth;
        trees[s].leaves = candidates + s * (most_leaves + most_branches);
        trees[s].branches = trees[s].leaves + most_leaves;
    }
    error = grow_all(head, first, growth, trees, &to);
    for (int64_t s = 0; s < sequences && !error; s++) counts[s] = choose(&trees[s], &drafts[s]);
    free(memory);
    return error;
}
