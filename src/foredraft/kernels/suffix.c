/* The drafts of the proposer `suffix`. proposers/suffix_text.py does the same in Python: equal texts give equal drafts,
 * to the last bit of a score. */
#include <string.h>

#include "text.h"

enum {
    MOST = 32,      /* places that are looked at, the latest ones */
    SEPARATOR = -1, /* behind every answer in a store: nothing follows across it */
};

/* The longest match with the end of a text, up to max_n, and the places behind it, latest first; 0: there is none. */
static int64_t longest(const fd_text *text, const int32_t *end, int64_t size, int64_t max_n, int64_t *places,
                       int *num_places) {
    int64_t candidates[MOST], lengths[MOST];
    if (!fd_text_latest(text, 0, end, size, 1, candidates)) return 0; /* as for most positions of most sequences */
    /* The longest n-gram that has occurred has all places of the longest match, unless they are too many. */
    for (int i = (int)text->num_lengths - 1; i >= 0; i--) {
        int found = fd_text_latest(text, i, end, size, MOST, candidates);
        int64_t most = 0;
        for (int j = 0; j < found; j++) {
            const int32_t *here = text->tokens + (candidates[j] - text->offset);
            int64_t limit = candidates[j] - text->start, length = 0;
            if (limit > max_n) limit = max_n;
            if (limit > size) limit = size;
            while (length < limit && here[-1 - length] == end[-1 - length]) length++;
            lengths[j] = length;
            if (length > most) most = length;
        }
        if (most < text->lengths[0].n) continue; /* nothing, or another n-gram of the same hash */
        *num_places = 0;
        for (int j = 0; j < found; j++)
            if (lengths[j] == most) places[(*num_places)++] = candidates[j];
        return most;
    }
    return 0;
}

/* What followed an occurrence: where it runs into the end of its text, after `period` tokens, it comes round again. */
typedef struct {
    const int32_t *tokens;
    int64_t period;
    double doubt;
} ending;

/* A node that may be drafted: `count` endings from `first` on lead through it. */
typedef struct {
    double score;
    int order, parent, depth, first, count;
    int32_t token;
} branch;

/* The endings of a node stand side by side; where they part, they are sorted into those of its children, which keep
 * their order. So every ending belongs to one branch of the queue at most. */
typedef struct {
    const fd_suffix_rules *rules;
    int64_t matched, max_depth;
    ending endings[2 * MOST];
    branch queue[2 * MOST];
    int num_queued;
} draft_tree;

static void add_endings(draft_tree *tree, int *count, const fd_text *text, const int64_t *places, int num_places,
                        int is_store) {
    int64_t end = text->offset + text->count;
    for (int i = num_places - 1; i >= 0; i--) /* oldest first */
        tree->endings[(*count)++] =
            (ending){text->tokens + (places[i] - text->offset), is_store ? text->count : end - places[i],
                     is_store ? tree->rules->store_doubt : 1.0};
}

/* Sort the endings of a node by child, and leave out those that have none: child -1. */
static void sort_endings(ending *endings, int count, const int *child_of, const branch *children, int num_children) {
    ending sorted[2 * MOST];
    int place[2 * MOST], num_sorted = 0;
    for (int child = 0; child < num_children; child++) {
        place[child] = num_sorted;
        num_sorted += children[child].count;
    }
    for (int i = 0; i < count; i++)
        if (child_of[i] >= 0) sorted[place[child_of[i]]++] = endings[i];
    memcpy(endings, sorted, (size_t)num_sorted * sizeof(ending));
}

/* Queue the children of a node that are likely enough to be reached; `num_nodes` have been drafted. */
static void expand(draft_tree *tree, const branch *node, int parent, int num_nodes) {
    branch children[2 * MOST];
    ending *endings = tree->endings + node->first;
    int child_of[2 * MOST], num_children = 0, count = 0, widest = 0, next = node->first;
    if (node->depth == tree->max_depth) return;
    for (int i = 0; i < node->count; i++) {
        int64_t period = endings[i].period;
        int32_t token = endings[i].tokens[node->depth < period ? node->depth : node->depth % period];
        int child = 0;
        child_of[i] = -1;
        if (token == SEPARATOR) continue;
        while (child < num_children && children[child].token != token) child++;
        if (child == num_children)
            children[num_children++] = (branch){.parent = parent, .depth = node->depth + 1, .token = token};
        children[child].count++;
        child_of[i] = child;
        count++;
    }
    if (num_children > 1 || count < node->count) sort_endings(endings, node->count, child_of, children, num_children);
    for (int child = 1; child < num_children; child++)
        if (children[child].count > children[widest].count) widest = child;
    double doubt = num_children * tree->rules->doubts[tree->matched + node->depth];
    for (int child = 0; child < num_children; child++) {
        branch *each = &children[child];
        each->first = next;
        next += each->count;
        if (tree->rules->is_chain && child != widest) continue;
        double least = tree->endings[each->first].doubt; /* the sequence's own endings come first */
        each->score = node->score * each->count / (count + least * doubt);
        each->order = num_nodes * MOST + tree->num_queued;
        if (each->score >= tree->rules->min_score) tree->queue[tree->num_queued++] = *each;
    }
}

/* Likelier ones first; the rest of the order is that of the Python code's queue. */
static int comes_before(const branch *one, const branch *other) {
    if (one->score != other->score) return one->score > other->score;
    if (one->order != other->order) return one->order < other->order;
    if (one->parent != other->parent) return one->parent < other->parent;
    return one->token < other->token;
}

int fd_text_draft(const fd_text *own, const fd_text *store, int64_t size, const fd_suffix_rules *rules,
                  fd_nodes *nodes) {
    int64_t places[MOST], stored_places[MOST], stored = 0;
    int num_places = 0, num_stored = 0, num_endings = 0, num_nodes = 0;
    const int32_t *end = own->tokens + own->count;
    draft_tree tree;
    tree.rules = rules;
    tree.num_queued = 0;
    int64_t matched = longest(own, end, own->count, rules->max_n, places, &num_places);
    if (store) stored = longest(store, end, own->count, rules->max_n, stored_places, &num_stored);
    if (matched >= stored) add_endings(&tree, &num_endings, own, places, num_places, 0);
    if (stored >= matched && store) add_endings(&tree, &num_endings, store, stored_places, num_stored, 1);
    tree.matched = matched > stored ? matched : stored;
    tree.max_depth = (int64_t)(rules->depth * (double)tree.matched);
    if (size > FD_NODES) size = FD_NODES;
    expand(&tree, &(branch){.score = 1.0, .count = num_endings}, -1, 0);
    while (tree.num_queued && num_nodes < size) {
        int best = 0;
        for (int i = 1; i < tree.num_queued; i++)
            if (comes_before(&tree.queue[i], &tree.queue[best])) best = i;
        branch node = tree.queue[best];
        tree.queue[best] = tree.queue[--tree.num_queued];
        nodes->tokens[num_nodes] = node.token;
        nodes->parents[num_nodes] = node.parent;
        nodes->scores[num_nodes] = node.score;
        num_nodes++;
        expand(&tree, &node, num_nodes - 1, num_nodes);
    }
    return num_nodes;
}
