/* How much of the data should go by which order: the fractions f >= 0, sum 1, that make the
 * largest of sum_k load[i][k] f_k as small as possible. A matrix game; solved by the simplex
 * method on max sum x, load x <= 1 (all loads are positive), which starts feasible at x = 0.
 * Pure. */
#ifndef R2_PLAN_GAME_H
#define R2_PLAN_GAME_H

#define R2_GAME_COLUMNS 16

/* load[i * columns + k], all > 0. Fills fraction[columns] and price[rows] (the dual: how much each
 * row matters, sum 1). Returns the value, or < 0 when out of memory. */
double r2_game_solve(const double *load, int rows, int columns, double *fraction, double *price);

#endif
