/* In which order a process that ends says what it has to say: larger numbers first. */
#ifndef R2_UTIL_EXIT_H
#define R2_UTIL_EXIT_H

#define R2_EXIT_ENGINE 103  /* waits for what must not be lost, and may have to complain */
#define R2_EXIT_LOG 102     /* waits until all lines are written */
#define R2_EXIT_CONTROL 101 /* the segment's last update */

#endif
