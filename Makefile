# R2CCL: build, test, demo. `make help` lists the targets and the variables.
#
# Needs python3, gcc and make; everything else is detected and left out with a reason.
# Outputs: build/ (SAN=asan, SAN=tsan and CC=clang have a folder of their own in it) and .venv/.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DELETE_ON_ERROR:
.SECONDARY:
.DEFAULT_GOAL := all

# --- what and where -------------------------------------------------------------------------
ifeq ($(origin CC),default)
CC := gcc
endif
# A compiler for another processor, CC=aarch64-linux-gnu-gcc: what it makes runs under qemu's user mode.
gnu_gcc := -linux-gnu-gcc
cross := $(filter-out $(shell uname -m),$(if $(findstring $(gnu_gcc),$(CC)),$(firstword $(subst -, ,$(notdir $(CC))))))
AR ?= ar
ifneq ($(cross),)
AR := $(subst $(gnu_gcc),$(gnu_gcc)-ar,$(CC))
emulator := qemu-$(cross) -L /usr/$(cross)-linux-gnu
endif
PYTHON ?= python3
SAN ?=
VERBS ?=
WERROR ?=
CFLAGS ?= $(if $(SAN),-O1,-O2) -g

empty :=
space := $(empty) $(empty)
compiler := $(if $(findstring clang,$(notdir $(CC))),clang)
variant := $(subst $(space),-,$(strip $(cross) $(compiler) $(SAN) $(if $(filter no,$(VERBS)),noverbs)))
B ?= build$(addprefix /,$(variant))

sources = $(sort $(wildcard $(1)/*.c) $(wildcard $(1)/*/*.c))
objects = $(patsubst %.c,$(B)/obj/%.o,$(1))

# Headers of libraries are the same for all processors.
cross_inc := $(if $(cross),-idirafter /usr/include)

# RDMA needs only the header: the library is opened at run time. VERBS=no: as if it were not there.
verbs := $(if $(filter-out no,$(or $(VERBS),yes)),$(shell $(CC) $(cross_inc) -E -include infiniband/verbs.h -x c /dev/null >/dev/null 2>&1 && echo yes))

plugin_src := $(call sources,net_plugin)
plugin_src += $(filter-out $(if $(verbs),,net_plugin/transport/verbs/%),\
	$(sort $(wildcard net_plugin/*/*/*.c)))
# Parts of the shim that know neither NCCL nor a GPU; unit tests link them from the archive.
agree_src := $(sort $(foreach room,agree plan reduce direct,$(wildcard shim/$(room)/*.c)))
# The wrappers. Those files of `named_src` are compiled once more for the library with NCCL's name;
# `preload_src` is only in the one for LD_PRELOAD.
shim_src := $(foreach room,nccl api real comms device,$(sort $(wildcard shim/$(room)/*.c)))
preload_src := $(wildcard shim/api/dlsym.c shim/api/predict.c)
named_src := shim/real/search.c shim/real/lacks.c $(wildcard shim/api/raw.c)
shim_lib_src := $(filter-out $(preload_src) shim/api/raw.c,$(shim_src))
host_src := $(call sources,tests/hostnccl)
perf_src := $(call sources,tests/perf)
unit_src := $(sort $(wildcard tests/unit/test_*.c))
tool_src := $(filter-out $(unit_src),$(sort $(wildcard tests/unit/*.c)))
help_src := $(sort $(wildcard tests/unit/*/*.c))
fake_src := $(if $(verbs),$(sort $(wildcard tests/fakeverbs/*.c)))
stress_src := $(sort $(wildcard tests/stress/*.c))
bench_src := $(sort $(wildcard tests/bench/*.c))
agent_src := $(sort $(wildcard tests/rdma/agent/*.c))
probe_src := $(sort $(wildcard tests/rdma/probe/*.c))

plugin := $(B)/libnccl-net-r2ccl.so
# The same by the name that RCCL (AMD) looks for.
rccl := $(B)/librccl-net.so
shim := $(B)/libr2ccl.so
named := $(B)/nccl/libnccl.so.2
named_object := $(B)/nccl/shim.o
archive := $(B)/libr2ccl.a
helpers := $(B)/libr2test.a
host := $(B)/hostnccl/libnccl.so.2
fake := $(B)/fakeverbs/libibverbs.so.1
perf := $(B)/r2ccl_perf
unit := $(patsubst tests/unit/%.c,$(B)/tests/unit/%,$(unit_src))
noop := $(B)/tests/noop/libnccl.so.2
noop_old := $(B)/tests/noop-old/libnccl.so.2
job_lib := $(B)/tests/shim/libjob.so
shim_tests := $(noop) $(noop_old) $(job_lib) $(B)/tests/shim/linked $(B)/tests/shim/host \
	$(B)/tests/shim/cost
tools := $(patsubst tests/unit/%.c,$(B)/tests/%,$(tool_src))
stress := $(patsubst tests/stress/%.c,$(B)/stress/%,$(stress_src))
bench := $(patsubst tests/bench/%.c,$(B)/bench/%,$(bench_src))

# Verbs' headers are the system's, or those that the RDMA guest's packages were unpacked with.
verbs_header := infiniband/verbs.h
verbs_inc := $(patsubst %/$(verbs_header),%,$(firstword $(wildcard /usr/include/$(verbs_header) \
	build/rdma/packages/libibverbs-dev_*/files/usr/include/$(verbs_header))))
rdma := $(B)/rdma/agent $(if $(verbs_inc),$(B)/rdma/probe)

# r2ccl-ctl simulate: SimGrid's headers and a C++ compiler, where they are. Not with another compiler's flags.
CXX ?= g++
simgrid := $(if $(variant),,$(shell $(CXX) -E -include simgrid/s4u.hpp -x c++ /dev/null >/dev/null 2>&1 && echo yes))
simulate := $(if $(simgrid),$(B)/r2ccl_simulate)

venv := .venv
venv_stamp := $(venv)/.stamp

# --- flags ----------------------------------------------------------------------------------
ifeq ($(SAN),asan)
san_flags := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
else ifeq ($(SAN),tsan)
san_flags := -fsanitize=thread -fno-omit-frame-pointer
else ifneq ($(SAN),)
$(error SAN=$(SAN) is unknown: leave it empty, or use asan or tsan)
endif

# A plan is the same on every processor: no multiplication and addition become one with one rounding.
contract := -ffp-contract=off
base_flags := -std=gnu11 -Wall -Wextra $(if $(WERROR),-Werror) -fPIC -fvisibility=hidden -pthread \
	-Inet_plugin -Ishim $(cross_inc) $(if $(verbs),-DR2_HAVE_VERBS) $(contract) $(san_flags)
libs := -pthread -ldl -lrt -lm
# clang leaves the sanitizer's symbols of a shared object to the program.
defs := $(if $(and $(compiler),$(SAN)),,-Wl,-z,defs)

# Tells r2ccl-ctl and the tests of a build folder other than build/.
tool_env := $(if $(filter-out build,$(B)),R2CCL_BUILD_DIR=$(abspath $(B)))

# --- main targets ---------------------------------------------------------------------------
.PHONY: all native objects artefacts venv demo test test-c test-py test-verbs test-san test-aarch64 test-rdma rdma-programs lint format bench chaos wheel wheels deb man \
	clean distclean help FORCE

all: native venv ## build everything: native code and .venv with r2ccl-ctl in it
	@echo "r2ccl-ctl is at $(venv)/bin/r2ccl-ctl; next: make demo"

native: artefacts $(simulate) $(archive) $(shim_tests) $(unit) $(tools) $(stress) $(bench) $(rdma) ## build only the native code

# Every source that is compiled, and nothing linked: what compilers have to say of it.
compiled := $(plugin_src) $(agree_src) $(shim_lib_src) $(preload_src) $(host_src) $(perf_src) $(unit_src) $(tool_src) $(help_src) \
	$(fake_src) $(stress_src) $(bench_src) $(agent_src) $(if $(verbs_inc),$(probe_src)) \
	$(wildcard tests/shim/*.c tests/shim/noop/*.c)
objects: $(call objects,$(compiled)) $(patsubst %.c,$(B)/obj/named/%.o,$(named_src))

artefacts: $(if $(plugin_src),$(plugin) $(rccl)) $(shim) $(named) $(named_object) $(if $(host_src),$(host)) \
	$(if $(perf_src),$(perf)) $(if $(fake_src),$(fake))

venv: $(venv_stamp) ## make .venv with r2ccl-ctl (editable) and the development tools

demo: native venv ## take NICs away under a running AllReduce on loopback; no privileges
	$(venv)/bin/r2ccl-ctl demo $(DEMO_ARGS)

test: native venv ## C unit tests, then pytest
	@$(MAKE) test-c
	@$(MAKE) test-py

picked := $(patsubst %,$(B)/tests/unit/test_%,$(TESTS:test_%=%))
strange := $(filter-out $(unit),$(picked))
ifneq ($(strange),)
$(error no test $(strange:$(B)/tests/unit/test_%=%); there are $(unit:$(B)/tests/unit/test_%=%))
endif

test-c: $(if $(TESTS),$(picked),native) ## C unit tests of one variant (SAN=asan, CC=clang)
	@BUILD=$(B) SAN=$(SAN) EMULATOR="$(emulator)" mk/run-c-tests $(TESTS)

# Most tests wait more than they compute. File by file, since fixtures are made once for a file.
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder

test-py: native venv ## pytest without the soak tests, three files at a time (PYTEST_ARGS="-k name")
	$(tool_env) $(venv)/bin/python -m pytest $(PYTEST_ARGS)

# Of tests that know nothing of RDMA: what moves data between engines on loopback NICs.
verbs_suite := failover failover_process health silence line_order operator_view hostnccl shim rendezvous grey

test-verbs: native venv ## these Python tests over the stand-in for libibverbs: a NIC is an RDMA device
	TEST_VERBS=1 $(tool_env) $(venv)/bin/python -m pytest $(PYTEST_ARGS) $(verbs_suite:%=tests/py/test_%.py)

test-san: ## C unit tests under ASan+UBSan and under TSan
	@$(MAKE) test-c SAN=asan
	@$(MAKE) test-c SAN=tsan

test-aarch64: venv ## C unit tests and a job that loses a NIC as on an ARM server, under qemu's user mode
	@+mk/test-aarch64 $(TESTS)

rdma-programs: artefacts $(B)/rdma/agent $(B)/rdma/probe ## what runs in the RDMA guest

test-rdma: venv ## soft-RoCE in a virtual machine (rung 5): the RDMA guest
	@+mk/test-rdma $(RDMA_ARGS)

lint: venv ## -Werror under gcc and clang, clang-format, ruff, mypy, shellcheck
	@+mk/lint

format: venv ## rewrite C and Python sources in the project's style
	@mk/lint --format

bench: native venv ## benchmarks, each beside its baseline (BENCH_ARGS=--smoke: short)
	@$(tool_env) mk/bench $(BENCH_ARGS)

chaos: native venv ## soak: stress programs and soak tests (SECONDS_EACH=300)
	@$(tool_env) BUILD=$(B) SAN=$(SAN) mk/chaos

wheel: ## a wheel with the native artefacts in it, in dist/
	@$(MAKE) venv
	rm -rf build/python dist
	$(venv)/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls -l dist

wheels: ## wheels for glibc 2.28 and later, x86_64 and aarch64, in dist/ (compiled with zig from PyPI)
	@$(MAKE) venv
	@mk/wheels $(ARCH)

deb: artefacts ## a Debian package in dist/ (no network)
	@$(MAKE) venv
	@$(tool_env) BUILD=$(B) mk/deb

man: ## man pages from the help texts, in build/man
	@$(MAKE) venv
	@rm -rf build/man
	@$(venv)/bin/python -m r2ccl_ctl.cli.man build/man
	@echo "$$(ls build/man | wc -l) pages are in build/man"

clean: ## remove what the build made, but not .venv
	rm -rf build dist

distclean: clean ## remove .venv as well
	rm -rf $(venv) r2ccl.egg-info .mypy_cache .ruff_cache .pytest_cache

help: ## this text
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) \
		| while IFS=$$'\t' read -r name text; do printf '%-12s %s\n' "$$name" "$$text"; done
	@echo
	@echo "Variables: CC=gcc|clang|aarch64-linux-gnu-gcc, SAN=asan|tsan, VERBS=no (without RDMA), WERROR=1, CFLAGS, PYTHON, TESTS, PYTEST_ARGS,"
	@echo "BENCH_ARGS, DEMO_ARGS, RDMA_ARGS. A variant is built in its own folder: build/asan, build/clang, ..."

# --- rules ----------------------------------------------------------------------------------
# A stamp is rewritten only when its text changes, so that other flags or files mean a rebuild.
# -Werror changes no object.
define stamp
@mkdir -p $(@D)
@echo '$(1)' | cmp -s - $@ || echo '$(1)' > $@
endef

$(B)/flags: FORCE
	$(call stamp,$(CC) $(filter-out -Werror,$(base_flags)) $(CFLAGS) $(CPPFLAGS))

# The version stands in one place.
version := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' r2ccl_ctl/__init__.py)
$(B)/obj/net_plugin/control/describe.o: private CPPFLAGS += -DR2_VERSION='"$(version)"'
$(B)/obj/net_plugin/control/describe.o: r2ccl_ctl/__init__.py

$(B)/sources: FORCE
	$(call stamp,$(plugin_src) : $(agree_src) : $(shim_src) : $(host_src) : $(perf_src) : $(help_src) : $(fake_src))

$(B)/obj/%.o: %.c $(B)/flags
	@mkdir -p $(@D)
	@echo "  CC   $<$(addprefix  ,$(variant:%=[%]))"
	@$(CC) $(base_flags) $(CFLAGS) $(CPPFLAGS) -I$(<D) -MMD -MP -c -o $@ $<

# Loops over elements: gcc makes vector code of them only with this.
$(B)/obj/shim/reduce/levels.o: private CPPFLAGS += -O3

$(plugin): soname := libnccl-net.so
$(rccl): soname := librccl-net.so
$(plugin) $(rccl): $(call objects,$(plugin_src)) $(B)/sources
	@echo "  LINK $@"
	@$(CC) -shared $(san_flags) $(CFLAGS) $(LDFLAGS) -Wl,-soname,$(soname) -Wl,-z,nodelete \
		$(defs) -o $@ $(filter %.o,$^) $(libs)

$(archive): $(call objects,$(plugin_src) $(agree_src) $(shim_lib_src)) $(B)/sources
	@rm -f $@
	@$(AR) rcs $@ $(filter %.o,$^)

$(B)/obj/named/%.o: %.c $(B)/flags
	@mkdir -p $(@D)
	@echo "  CC   $<$(addprefix  ,$(variant:%=[%])) [named]"
	@$(CC) $(base_flags) $(CFLAGS) $(CPPFLAGS) -DR2_NAMED_NCCL -I$(<D) -MMD -MP -c -o $@ $<

$(shim): $(call objects,$(shim_lib_src) $(preload_src)) $(archive)
	@echo "  LINK $@"
	@$(CC) -shared $(san_flags) $(CFLAGS) $(LDFLAGS) -Wl,-soname,$(@F) -Wl,-z,nodelete $(defs) \
		-o $@ $(filter %.o,$^) $(archive) $(libs)

# All of it as one object, from which `r2ccl-ctl shim build` makes a library for a newer NCCL.
$(named_object): $(call objects,$(filter-out $(named_src),$(shim_lib_src))) \
		$(patsubst %.c,$(B)/obj/named/%.o,$(named_src)) $(archive)
	@mkdir -p $(@D)
	@echo "  LINK $@"
	@$(CC) -r -nostdlib -o $@ $(filter %.o,$^) $(archive)

$(named): $(named_object)
	@echo "  LINK $@"
	@$(CC) -shared $(san_flags) $(CFLAGS) $(LDFLAGS) -Wl,-soname,$(@F) -Wl,-z,nodelete $(defs) \
		-o $@ $(named_object) $(libs)

$(helpers): $(call objects,$(help_src)) $(B)/sources
	@rm -f $@
	@$(AR) rcs $@ $(filter %.o,$^)

$(host): $(call objects,$(host_src)) $(B)/sources
	@mkdir -p $(@D)
	@echo "  LINK $@"
	@$(CC) -shared $(san_flags) $(CFLAGS) $(LDFLAGS) -Wl,-soname,libnccl.so.2 $(defs) \
		-o $@ $(filter %.o,$^) $(libs)
	@ln -sf libnccl.so.2 $(@D)/libnccl.so

$(fake): $(call objects,$(fake_src) net_plugin/util/copy.c) $(B)/sources
	@mkdir -p $(@D)
	@echo "  LINK $@"
	@$(CC) -shared $(san_flags) $(CFLAGS) $(LDFLAGS) -Wl,-soname,$(@F) $(defs) \
		-o $@ $(filter %.o,$^) $(libs)

$(B)/r2ccl_simulate: tests/simulate/simulate.cpp $(call objects,shim/plan/schedule.c shim/plan/shard.c)
	@echo "  LINK $@"
	@$(CXX) -std=gnu++17 -O2 -g -Wall -Wextra $(if $(WERROR),-Werror) -Ishim -o $@ $^ -lsimgrid -lm

$(perf): $(call objects,$(perf_src)) $(if $(host_src),$(host)) $(B)/sources
	@echo "  LINK $@"
	@$(CC) $(san_flags) $(CFLAGS) $(LDFLAGS) -o $@ $(filter %.o,$^) \
		$(if $(host_src),-L$(B)/hostnccl -Wl$(comma)--as-needed -lnccl) \
		-Wl,--enable-new-dtags,-rpath,'$$ORIGIN/hostnccl' $(libs)

comma := ,

# The shim's test programs: an NCCL that does nothing, and ways to reach an NCCL.
noop_src := $(wildcard tests/shim/noop/*.c)
$(noop): $(call objects,$(noop_src))
$(noop_old): $(B)/obj/tests/shim/noop_old.o
$(noop) $(noop_old):
	@mkdir -p $(@D)
	@echo "  LINK $@"
	@$(CC) -shared $(san_flags) $(CFLAGS) $(LDFLAGS) -Wl,-soname,libnccl.so.2 -o $@ $^ $(libs)

nccl_rpath := -Wl,--disable-new-dtags,-rpath,'$$ORIGIN/../../hostnccl'
$(B)/obj/tests/shim/job.o: CPPFLAGS += -Itests
$(job_lib): $(B)/obj/tests/shim/job.o $(host)
	@mkdir -p $(@D)
	@$(CC) -shared $(san_flags) $(CFLAGS) $(LDFLAGS) -Wl,-soname,$(@F) $(nccl_rpath) -o $@ $^ $(libs)
$(B)/tests/shim/linked: $(B)/obj/tests/shim/linked.o $(B)/obj/tests/shim/job.o $(host)
	@mkdir -p $(@D)
	@$(CC) $(san_flags) $(CFLAGS) $(LDFLAGS) $(nccl_rpath) -o $@ $^ $(libs)
$(B)/tests/shim/cost: $(B)/obj/tests/shim/cost.o $(noop)
	@mkdir -p $(@D)
	@$(CC) -rdynamic $(san_flags) $(CFLAGS) $(LDFLAGS) -Wl,-rpath,'$$ORIGIN/../noop' -o $@ $^ $(libs)
$(B)/tests/shim/host: $(B)/obj/tests/shim/host.o
	@mkdir -p $(@D)
	@$(CC) $(san_flags) $(CFLAGS) $(LDFLAGS) -o $@ $^ $(libs)
fakecuda := $(B)/tests/fakecuda/libcuda.so.1
$(fakecuda): $(B)/obj/tests/shim/fakecuda.o
	@mkdir -p $(@D)
	@echo "  LINK $@"
	@$(CC) -shared $(san_flags) $(CFLAGS) $(LDFLAGS) -Wl,-soname,$(@F) -o $@ $^ $(libs)
$(patsubst %,$(B)/tests/unit/test_%,shim_timing): | $(fakecuda)

$(B)/tests/unit/test_shim $(B)/tests/unit/test_shim_config $(B)/tests/unit/test_shim_plan \
	$(B)/tests/unit/test_shim_group $(B)/tests/unit/test_shim_timing: | $(noop) $(noop_old) $(plugin)
$(B)/tests/unit/test_hostnccl: | $(plugin) $(host)

$(patsubst %,$(B)/tests/unit/test_verbs_%,fence revoke device lanes removal attr lost slow want words damage attack events hang proof start storm): | $(if $(fake_src),$(fake))

# $(1): folder of the source, $(2): folder of the program
define program
$(B)/$(2)/%: $(B)/obj/$(1)/%.o $(archive) $(helpers)
	@mkdir -p $$(@D)
	@echo "  LINK $$@"
	@$$(CC) $$(san_flags) $$(CFLAGS) $$(LDFLAGS) -rdynamic -o $$@ $$< $(helpers) $(archive) $$(libs)
endef
$(eval $(call program,tests/unit,tests/unit))
$(eval $(call program,tests/unit,tests))
$(eval $(call program,tests/stress,stress))
$(eval $(call program,tests/bench,bench))

$(B)/rdma/agent: $(call objects,$(agent_src)) $(B)/sources
	@mkdir -p $(@D)
	@echo "  LINK $@"
	@$(CC) $(san_flags) $(CFLAGS) $(LDFLAGS) -o $@ $(filter %.o,$^)

$(call objects,$(probe_src)): CPPFLAGS += $(if $(verbs_inc),-isystem $(verbs_inc))

$(B)/rdma/probe: $(call objects,$(probe_src)) $(B)/sources
	@mkdir -p $(@D)
	@echo "  LINK $@"
	@$(CC) $(san_flags) $(CFLAGS) $(LDFLAGS) -o $@ $(filter %.o,$^) $(libs)

$(venv_stamp): pyproject.toml setup.py mk/venv $(wildcard r2ccl_ctl/__init__.py)
	@PYTHON=$(PYTHON) mk/venv $(venv)
	@touch $@

-include $(patsubst %.c,$(B)/obj/named/%.d,$(named_src))
-include $(patsubst %.o,%.d,$(call objects,$(plugin_src) $(agree_src) $(shim_src) $(host_src) \
	$(wildcard tests/shim/*.c) $(noop_src) $(perf_src) $(unit_src) $(tool_src) $(help_src) $(fake_src) \
	$(stress_src) $(bench_src) $(agent_src) $(probe_src)))
