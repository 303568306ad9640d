/* What a text holds. A place is the number of tokens before it, counted from the first there ever was. It is known for
 * an n-gram as soon as a token stands at it: the n-gram ends before it, and the token followed. An n-gram is known by a
 * 64-bit hash; a collision costs a bad draft, nothing else. */
#ifndef FOREDRAFT_TEXT_H
#define FOREDRAFT_TEXT_H

#include "foredraft.h"

enum { FD_TEXT_LENGTHS = 5 }; /* of n-grams, at most */

typedef struct {
    uint64_t hash;
    int64_t place; /* the latest; 0: the slot is free */
} gram_slot;

/* The n-grams of one length: a hash table with linear probing, never more than half full. */
typedef struct {
    gram_slot *slots; /* [mask + 1] */
    uint64_t mask, used;
    int32_t *back; /* of every token: how far before its place the n-gram's previous place is, 0: there is none */
    int64_t n;
} gram_table;

struct fd_text {
    int32_t *tokens; /* [capacity] */
    int64_t count, capacity;
    int64_t offset; /* the place of tokens[0] */
    int64_t start;  /* the place of the first token that is not forgotten */
    int64_t num_lengths;
    gram_table lengths[FD_TEXT_LENGTHS]; /* shortest first */
};

/* How many of the latest places, up to `most`, follow the n-gram that ends the `size` tokens before `end`; and which,
 * latest first. */
int fd_text_latest(const fd_text *text, int length, const int32_t *end, int64_t size, int most, int64_t *places);

#endif
