#include "../check.h"

/* For test programs without one of their own. */
int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
