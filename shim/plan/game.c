#include "plan/game.h"

#include <stdlib.h>

struct r2_game {
    int rows, columns;
    double *t;    /* (rows + 1) x (columns + 1): the last row is the objective, the last column b */
    int *basic;   /* [rows]: variable of the row; below columns an x, else a slack */
    int *outside; /* [columns]: variable of the column */
};

static double *r2_game_cell(const struct r2_game *g, int row, int column)
{
    return &g->t[row * (g->columns + 1) + column];
}

/* Bland's rule: the lowest variable that helps enters, the lowest of the tightest rows leaves. */
static int r2_game_entering(const struct r2_game *g)
{
    int best = -1;

    for (int c = 0; c < g->columns; c++) {
        if (*r2_game_cell(g, g->rows, c) < -1e-12 &&
            (best < 0 || g->outside[c] < g->outside[best])) {
            best = c;
        }
    }
    return best;
}

static int r2_game_leaving(const struct r2_game *g, int column)
{
    int best = -1;
    double least = 0;

    for (int r = 0; r < g->rows; r++) {
        double a = *r2_game_cell(g, r, column);
        double ratio;

        if (a <= 1e-12) {
            continue;
        }
        ratio = *r2_game_cell(g, r, g->columns) / a;
        if (best < 0 || ratio < least - 1e-12 ||
            (ratio < least + 1e-12 && g->basic[r] < g->basic[best])) {
            best = r;
            least = ratio;
        }
    }
    return best;
}

static void r2_game_pivot(struct r2_game *g, int row, int column)
{
    double pivot = *r2_game_cell(g, row, column);
    int variable = g->basic[row];

    for (int r = 0; r <= g->rows; r++) {
        double factor = *r2_game_cell(g, r, column) / pivot;

        for (int c = 0; r != row && c <= g->columns; c++) {
            if (c != column) {
                *r2_game_cell(g, r, c) -= factor * *r2_game_cell(g, row, c);
            }
        }
    }
    for (int r = 0; r <= g->rows; r++) {
        if (r != row) {
            *r2_game_cell(g, r, column) /= -pivot;
        }
    }
    for (int c = 0; c <= g->columns; c++) {
        *r2_game_cell(g, row, c) /= c == column ? pivot * pivot : pivot;
    }
    g->basic[row] = g->outside[column];
    g->outside[column] = variable;
}

static double r2_game_read(const struct r2_game *g, double *fraction, double *price)
{
    double total = *r2_game_cell(g, g->rows, g->columns);

    for (int c = 0; c < g->columns; c++) {
        fraction[c] = 0;
    }
    for (int r = 0; r < g->rows; r++) {
        price[r] = 0;
    }
    for (int r = 0; r < g->rows; r++) {
        if (g->basic[r] < g->columns) {
            fraction[g->basic[r]] = *r2_game_cell(g, r, g->columns) / total;
        }
    }
    for (int c = 0; c < g->columns; c++) {
        if (g->outside[c] >= g->columns) {
            price[g->outside[c] - g->columns] = *r2_game_cell(g, g->rows, c) / total;
        }
    }
    return 1 / total;
}

double r2_game_solve(const double *load, int rows, int columns, double *fraction, double *price)
{
    struct r2_game g = {.rows = rows, .columns = columns};
    double value = -1;
    int column;

    g.t = calloc((size_t)(rows + 1) * (size_t)(columns + 1), sizeof(*g.t));
    g.basic = calloc((size_t)rows + 1, sizeof(*g.basic));
    g.outside = calloc((size_t)columns + 1, sizeof(*g.outside));
    if (!g.t || !g.basic || !g.outside) {
        goto out;
    }
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < columns; c++) {
            *r2_game_cell(&g, r, c) = load[r * columns + c];
        }
        *r2_game_cell(&g, r, columns) = 1;
        g.basic[r] = columns + r;
    }
    for (int c = 0; c < columns; c++) {
        *r2_game_cell(&g, rows, c) = -1;
        g.outside[c] = c;
    }
    /* Bounded for the case that rounding defeats Bland's rule: what is there then is feasible. */
    for (int step = 0; step < 1000 && (column = r2_game_entering(&g)) >= 0; step++) {
        int row = r2_game_leaving(&g, column);

        if (row < 0) {
            break;
        }
        r2_game_pivot(&g, row, column);
    }
    value = r2_game_read(&g, fraction, price);
out:
    free(g.t);
    free(g.basic);
    free(g.outside);
    return value;
}
