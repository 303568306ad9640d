/* Projections: linear layers of several weights, as layers and experts have them. */
#ifndef FD_LAYERS_H
#define FD_LAYERS_H

#include "foredraft.h"

/* Whether the parts of a projection fill it exactly. */
int check_projection(const fd_projection *projection, int64_t outputs, int64_t inputs);

int project(const fd_projection *projection, const float *x, int64_t rows, float *y);

#endif
