/* Rung 1: the rules of R2CCL_FAULTS. */
#include <locale.h>
#include <stdlib.h>

#include "check.h"
#include "engine/nic/faultrules.h"
#include "util/clock.h"

static struct r2_fault_rule rules[R2_FAULT_RULES];
static char err[400];

static int parse(const char *text)
{
    err[0] = '\0';
    return r2_fault_rules_parse(text, rules, err, sizeof(err));
}

TEST(kinds)
{
    CHECK_EQ(parse("eth1 blackhole; nic=eth2 kind=error\n 10.0.0.1 slow=100mbit ;eth4 loss=0.5%;"
                   "eth5 slow=1.5MB/s; eth1 recover at=5s;"),
             6);
    CHECK_STR(rules[0].nic, "eth1");
    CHECK_EQ(rules[0].fault.kind, R2_SEG_FAULT_BLACKHOLE);
    CHECK(rules[0].fault.tx && rules[0].fault.rx && !rules[0].recover && rules[0].rank == -1);
    CHECK_STR(rules[1].nic, "eth2");
    CHECK_EQ(rules[1].fault.kind, R2_SEG_FAULT_ERROR);
    CHECK_EQ(rules[2].fault.rate, 12500000);
    CHECK_EQ(rules[3].fault.loss_ppm, 5000);
    CHECK_EQ(rules[4].fault.rate, 1572864);
    CHECK(rules[5].recover);
    CHECK_EQ(rules[5].at_ns, 5 * R2_NS_PER_S);
    CHECK_EQ(parse(""), 0);
    CHECK_EQ(parse(" ; \n"), 0);
}

TEST(options)
{
    CHECK_EQ(parse("eth1 blackhole direction=rx after=1G ops=7 for=500ms at=2 node=node-b rank=3"),
             1);
    CHECK(rules[0].fault.rx && !rules[0].fault.tx);
    CHECK_EQ(rules[0].fault.after_bytes, 1u << 30);
    CHECK_EQ(rules[0].fault.after_ops, 7);
    CHECK_EQ(rules[0].fault.for_ns, 500 * R2_NS_PER_MS);
    CHECK_EQ(rules[0].at_ns, 2 * R2_NS_PER_S);
    CHECK_STR(rules[0].node, "node-b");
    CHECK_EQ(rules[0].rank, 3);
}

TEST(bad)
{
    static const char *const bad[] = {"eth1",
                                      "eth1 fire",
                                      "eth1 slow",
                                      "eth1 slow=100M",
                                      "eth1 slow=0bit",
                                      "eth1 slow=inf",
                                      "eth1 loss=0",
                                      "eth1 loss=101",
                                      "eth1 error after=",
                                      "eth1 error after=x",
                                      "eth1 error ops=-1",
                                      "eth1 error for=later",
                                      "eth1 error direction=up",
                                      "eth1 error rank=99999999999",
                                      "eth1 error often",
                                      "nic= error",
                                      "ok error; eth1 error color=red"};

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        CHECK_MSG(parse(bad[i]) < 0 && strstr(err, "is not understood"), "%s: %s", bad[i], err);
    CHECK_EQ(parse("eth1 error; eth2 slow=many"), -EINVAL);
    CHECK_MSG(strstr(err, "'slow=many' is not understood"), "%s", err);
}

/* Where the program has chosen a locale with a decimal comma, the point stays the point. */
TEST(comma)
{
    char dir[] = "/tmp/r2-locale-XXXXXX", command[128];
    bool made;

    CHECK(mkdtemp(dir));
    snprintf(command, sizeof(command), "localedef -i de_DE -f UTF-8 %s/comma >/dev/null 2>&1", dir);
    (void)!system(command); /* 1: made with warnings */
    setenv("LOCPATH", dir, 1);
    made = setlocale(LC_ALL, "comma") != NULL;
    if (made) {
        CHECK(strtod("0,5", NULL) > 0.4);
        CHECK_EQ(parse("eth1 loss=0.5%; eth2 slow=1.5MB/s"), 2);
        CHECK_EQ(rules[0].fault.loss_ppm, 5000);
        CHECK_EQ(rules[1].fault.rate, 1572864);
        CHECK_EQ(parse("eth1 loss=0,5%"), -EINVAL);
    } else {
        printf("no locale with a comma can be made here (localedef)\n");
    }
    setlocale(LC_ALL, "C");
    unsetenv("LOCPATH");
    snprintf(command, sizeof(command), "rm -r %s", dir);
    CHECK_EQ(system(command), 0);
}

TEST(most)
{
    char text[(R2_FAULT_RULES + 1) * 8 + 1] = "";

    for (int i = 0; i < R2_FAULT_RULES; i++)
        strcat(text, "a error;");
    CHECK_EQ(parse(text), R2_FAULT_RULES);
    strcat(text, "a error;");
    CHECK_EQ(parse(text), -EINVAL);
}

TEST(fuzz)
{
    static const char letters[] = "eth1 =;\n.0123slow=lossat:for\xff%";

    for (unsigned long round = 0; round < check_rounds(20000); round++) {
        char text[200];
        size_t n = check_below(sizeof(text) - 1);

        for (size_t i = 0; i < n; i++)
            text[i] = letters[check_below(sizeof(letters) - 1)];
        text[n] = '\0';
        CHECK_LE(parse(text), R2_FAULT_RULES);
    }
}
