#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "probe.h"

static const char usage[] =
    "probe --a DEVICE --b DEVICE [--lib LIBRARY] [--act COMMAND] [--list] [STEP...]\n"
    "Runs the steps (all of them, without names) and prints one JSON line for each.\n"
    "COMMAND is run with the name of a fault: down_a up_a down_b up_b hole_a fill_a hole_b fill_b\n"
    "loss clean gidoff_a gidon_a remove_b; without it, steps that need faults are left out.\n";

static const struct step *const groups[] = {basic_steps, error_steps, link_steps};

static const struct step *find_step(const char *name)
{
    for (size_t g = 0; g < sizeof(groups) / sizeof(groups[0]); g++)
        for (const struct step *step = groups[g]; step->name; step++)
            if (strcmp(step->name, name) == 0)
                return step;
    return NULL;
}

static void run_step(struct bed *bed, const struct step *step)
{
    if (step->when == NEEDS_ACT && !bed->act)
        return;
    report_begin(bed, step->name);
    step->run(bed);
    report_end(bed);
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"a", required_argument, NULL, 'a'},   {"b", required_argument, NULL, 'b'},
        {"lib", required_argument, NULL, 'l'}, {"act", required_argument, NULL, 'x'},
        {"list", no_argument, NULL, 't'},      {0},
    };
    static struct bed bed;
    const char *library = "libibverbs.so.1", *a = NULL, *b = NULL;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (c) {
        case 'a':
            a = optarg;
            break;
        case 'b':
            b = optarg;
            break;
        case 'l':
            library = optarg;
            break;
        case 'x':
            bed.act = optarg;
            break;
        case 't':
            for (size_t g = 0; g < sizeof(groups) / sizeof(groups[0]); g++)
                for (const struct step *step = groups[g]; step->name; step++)
                    printf("%s%s\n", step->name,
                           step->when == NEEDS_ACT ? " (needs --act)"
                           : step->when == BY_NAME ? " (by name)"
                                                   : "");
            return 0;
        default:
            fputs(usage, stderr);
            return 2;
        }
    }
    if (!a || !b) {
        fputs(usage, stderr);
        return 2;
    }
    for (int i = optind; i < argc; i++)
        if (!find_step(argv[i]))
            die("no step %s", argv[i]);
    bed_open(&bed, library, a, b);
    if (optind < argc) {
        for (int i = optind; i < argc; i++)
            run_step(&bed, find_step(argv[i]));
    } else {
        for (size_t g = 0; g < sizeof(groups) / sizeof(groups[0]); g++)
            for (const struct step *step = groups[g]; step->name; step++)
                if (step->when != BY_NAME)
                    run_step(&bed, step);
    }
    bed_close(&bed);
    return 0;
}
