// Every rule there is. A new one is its header and a line in the list.
//
// The includer defines what a line becomes: SPARSESTEP_RULES(X) is X(SparseAdam) X(Adam) ...
#pragma once

#include "rules/adagrad.h"
#include "rules/adam.h"
#include "rules/ftrl.h"
#include "rules/lion.h"
#include "rules/nadam.h"
#include "rules/radam.h"
#include "rules/rmsprop.h"
#include "rules/rowwise_adagrad.h"
#include "rules/rowwise_adam.h"
#include "rules/sgd.h"
#include "rules/sparse_adam.h"

// clang-format off
#define SPARSESTEP_RULES(X)             \
    X(SparseAdam)                       \
    X(SparseAdamPerRow)                 \
    X(Adam)                             \
    X(AdamPerRow)                       \
    X(AMSGrad)                          \
    X(AMSGradPerRow)                    \
    X(NAdam)                            \
    X(RAdam)                            \
    X(Adagrad)                          \
    X(RowwiseAdagrad)                   \
    X(RowwiseAdam)                      \
    X(RowwiseAdamPerRow)                \
    X(RowwiseAdamWithoutMomentum)       \
    X(RowwiseAdamWithoutMomentumPerRow) \
    X(SGD)                              \
    X(MomentumSGD)                      \
    X(RMSprop)                          \
    X(MomentumRMSprop)                  \
    X(CenteredRMSprop)                  \
    X(CenteredMomentumRMSprop)          \
    X(Lion)                             \
    X(Ftrl)
// clang-format on
