/* More NICs that nobody came over than questions are out at a time, over a scripted transport
 * (rung 2): each has its turn, and all are known at about the same time. */
#define NICS 12
#include "reach_looks.h"

/* Eleven are to be told, eight are asked at a time, and the engine looks by itself as well: all are
 * told after 19 to 21 looks. Where the first eight always come first it takes 27 or more. */
TEST(each_in_its_turn)
{
    int told = 0, looks = 0;

    remote_new(&r, false, NICS);
    CHECK(remote_open(&r, 1));
    while (told < NICS - 1 && looks < 24) {
        one_look(NULL);
        looks++;
        told = 0;
        for (int i = 1; i < NICS; i++)
            told += marked(i);
    }
    CHECK_EQ(told, NICS - 1);
    for (int i = 1; i < NICS; i++)
        CHECK_EQ(warned(i, WORD), 1);
    CHECK(!marked(0));
    remote_end(&r);
}

int main(int argc, char **argv)
{
    static const char *const env[] = {
        "R2CCL_DAMP", "0", "R2CCL_NO_PATH_TIMEOUT", "60s", "R2CCL_GREY", "0", NULL};

    remote_wired = true;
    remote_engine(NICS, env);
    for (int i = 0; i < NICS; i++)
        remote_command(set_subnet, i);
    return check_main(argc, argv);
}
