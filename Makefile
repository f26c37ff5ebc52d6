# Everything that people and CI run; `make` alone lists it. You need Go, git, make, the Go module proxy and, for the race detector,
# a C compiler: every tool and every foreign binary is built from a Go module into bin/.

SHELL        := bash
.SHELLFLAGS  := -euo pipefail -c
MAKEFLAGS    += --no-builtin-rules --no-print-directory
.SUFFIXES:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := bin

# The machine's Go may be older than the one that go.mod asks for; it then fetches the right one.
export GOTOOLCHAIN := auto
# The version is stamped below instead: git's own stamping fails where the checkout belongs to another user.
# Packages compile a sixth faster without information for debuggers, of which binaries are stripped anyway. A package is
# compiled again for each combination of toolchain, these flags and -trimpath, so all builds but those of a release have the same.
BUILD_FLAGS        := -buildvcs=false -gcflags=all=-dwarf=false
export GOFLAGS     := $(BUILD_FLAGS) $(filter-out -buildvcs=% $(BUILD_FLAGS),$(GOFLAGS))
# Where envtest finds etcd and kube-apiserver, and how long they may take while the machine is busy with other tests.
export KUBEBUILDER_ASSETS := $(abspath $(BIN))
export KUBEBUILDER_CONTROLPLANE_START_TIMEOUT := 4m
export KUBEBUILDER_CONTROLPLANE_STOP_TIMEOUT  := 2m

# The workspace says which modules are ours.
MODULES  := $(shell sed -n 's|^[[:space:]]*\./||p' go.work)
PACKAGES := $(addprefix ./,$(addsuffix /...,$(MODULES)))
COMMANDS := $(patsubst %/main.go,%,$(wildcard agent/cmd/*/main.go shim/cmd/*/main.go pkg/cmd/*/main.go deploy/sandbox/cmd/*/main.go test/cmd/*/main.go))

VERSION ?= $(or $(shell git describe --tags --exact-match --dirty 2>/dev/null),devel)
COMMIT  ?= $(shell git rev-parse HEAD 2>/dev/null)
LDFLAGS  = -s -w \
	-X github.com/karpenter-capi/karpenter-capi/agent/internal/version.version=$(VERSION) \
	-X github.com/karpenter-capi/karpenter-capi/agent/internal/version.commit=$(COMMIT) \
	-X github.com/karpenter-capi/karpenter-capi/pkg/cmd/internal/program.version=$(VERSION) \
	-X sigs.k8s.io/karpenter/pkg/operator.Version=$(VERSION)

include deploy/tools/tools.mk
-include deploy/tools/sandbox.mk
include deploy/tools/release.mk

##@ General

.PHONY: help
help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} \
		/^##@ / {printf "\n%s\n", substr($$0, 5)} \
		/^[a-zA-Z0-9_-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' Makefile deploy/tools/release.mk

##@ Build

.PHONY: build
build: $(addprefix $(BIN)/,$(notdir $(COMMANDS))) ## Build our own binaries into bin/

# Go knows best whether one of our own binaries is up to date, so it is always asked.
define command
$(BIN)/$(notdir $(1)): FORCE
	@mkdir -p $$(@D); start=$$$$(date +%s); \
	CGO_ENABLED=0 go build -ldflags '$$(LDFLAGS)' -o $$@ ./$(1) && echo "built    $$@ in $$$$(( $$$$(date +%s) - start )) s"
endef
$(foreach c,$(COMMANDS),$(eval $(call command,$(c))))

.PHONY: FORCE
FORCE:

# The platforms that krew installs the plugin on.
KREW_PLATFORMS ?= linux/amd64 linux/arm64 darwin/amd64 darwin/arm64
# krew wants a semantic version.
KREW_VERSION = $(if $(filter v%,$(VERSION)),$(VERSION),v0.0.0-$(VERSION))

.PHONY: krew
krew: ## Build the kubectl plugin's archives and its manifest for krew, in bin/krew (KREW_PLATFORMS=linux/amd64)
	@rm -rf $(BIN)/krew && mkdir -p $(BIN)/krew && sed 's|VERSION|$(KREW_VERSION)|' deploy/krew/capi.yaml >$(BIN)/krew/capi.yaml && \
	for platform in $(KREW_PLATFORMS); do \
		name=$${platform//\//-}; archive=$(BIN)/krew/kubectl-capi-$$name.tar.gz; dir=$$(mktemp -d); cp LICENSE "$$dir"; \
		GOOS=$${platform%/*} GOARCH=$${platform#*/} CGO_ENABLED=0 GOFLAGS=-buildvcs=false go build -trimpath -ldflags '$(LDFLAGS)' -o "$$dir/kubectl-capi" ./shim/cmd/kubectl-capi && \
		tar --sort=name --owner=0 --group=0 --mtime=@0 -c -C "$$dir" LICENSE kubectl-capi | gzip -n >"$$archive" && rm -r "$$dir" && \
		sum=$$(sha256sum "$$archive" | cut -d' ' -f1) && sed -i "s|SHA256_OF_$$name|$$sum|" $(BIN)/krew/capi.yaml && echo "krew: $$archive" || exit 1; \
	done && echo "krew: $(BIN)/krew/capi.yaml"

.PHONY: tools
tools: $(TOOLS) $(SANDBOX_FOREIGN_BINARIES) $(SANDBOX_ETCD_TOOLS) $(SANDBOX_CAPI_MANIFESTS) ## Build every tool and the sandbox's control planes (minutes on a cold cache)

.PHONY: clean
clean: ## Remove bin/, but no sandboxes
	rm -rf $(BIN)

##@ Generate and check

.PHONY: generate
generate: generate-proto generate-go generate-docs sandbox-generate ## Regenerate all generated files: Go from protos, deep copies, CRDs, schemas of the charts' values, reference docs

.PHONY: generate-proto
generate-proto: $(BUF) $(DESCRIPTORS) $(PRINT_PROTO) $(PROTOC_GEN_GO) $(PROTOC_GEN_GRPC) $(PROTOC_GEN_DOCS)
	$(PRINT_PROTO) proto/third_party/protovalidate
	$(BUF) generate
	$(BUF) generate --template proto/buf.gen.cluster-autoscaler.yaml
	$(BUF) generate --template docs/examples/bigfleet/buf.gen.yaml
	set=$$(mktemp --suffix=.binpb) && trap 'rm -f "$$set"' EXIT && \
	$(BUF) build proto --path proto/capi --exclude-source-info --as-file-descriptor-set -o "$$set" && $(DESCRIPTORS) "$$set" proto/descriptors.binpb

.PHONY: generate-go
generate-go: $(CONTROLLER_GEN)
	cd agent && $(abspath $(CONTROLLER_GEN)) object crd paths=./api/... output:crd:dir=../deploy/charts/agent/files/crds
	cd shim && $(abspath $(CONTROLLER_GEN)) object crd paths=./apis/... output:crd:dir=../deploy/charts/shim/files/crds
	cd shim && go mod download sigs.k8s.io/karpenter && \
		install -m 0644 "$$(go list -m -f '{{.Dir}}' sigs.k8s.io/karpenter)"/pkg/apis/crds/*.yaml ../deploy/charts/shim/files/crds/

.PHONY: generate-schemas
generate-schemas: $(VALUES_SCHEMA)
	for chart in $(VALUES_OF); do $(VALUES_SCHEMA) $$chart $$chart/values.schema.json; done

# The binaries whose options are documented.
OPTIONS_BINARIES = $(addprefix $(BIN)/,capi-agent karpenter kubectl-capi fake-agent capi-agent-conformance)

# The types in the reference of the values are those of the schemas.
.PHONY: generate-docs
generate-docs: generate-schemas $(OPTIONS_DOCS) $(METRICS_DOCS) $(VALUES_DOCS) $(CRD_DOCS) $(OPTIONS_BINARIES)
	$(OPTIONS_DOCS) docs/options.md $(OPTIONS_OF)
	$(METRICS_DOCS) docs/metrics.md $(METRICS_OF)
	$(VALUES_DOCS) docs/values.md $(VALUES_OF)
	$(CRD_DOCS) docs/objects.md $(OBJECTS_OF)

# Binaries, each with the prefix of its environment variables, and whether they set the flags of its commands, too.
OPTIONS_OF = $(BIN)/capi-agent:CAPI_AGENT_ $(BIN)/karpenter: $(BIN)/kubectl-capi:KUBECTL_CAPI_:all $(BIN)/fake-agent:FAKE_AGENT_ $(BIN)/capi-agent-conformance:CAPI_AGENT_CONFORMANCE_
# Binaries, each with what the names of its own metrics begin with.
METRICS_OF = $(BIN)/capi-agent:capi_agent_ $(BIN)/karpenter:karpenter_capi_
# The charts whose values have a schema and are documented.
VALUES_OF = deploy/charts/agent deploy/charts/shim
# The CustomResourceDefinitions that are documented: our own, not Karpenter's.
OBJECTS_OF = $(sort $(wildcard deploy/charts/*/files/crds/*karpenter.cluster.x-k8s.io_*.yaml))

.PHONY: verify
verify: verify-generated verify-schemas verify-docs verify-modules verify-required verify-imports verify-api lint ## Check that generated files are current, modules tidy, imports allowed; all linters

# In a copy, so that a check never changes the tree that it checks.
.PHONY: verify-generated
verify-generated: $(GENERATORS)
	@echo "verify: generated files"
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && mkdir "$$dir/is" "$$dir/should" && \
	tar -c --exclude=./$(BIN) --exclude=./.git --exclude=./.sandbox . | tar -x -C "$$dir/is" && cp -a "$$dir/is/." "$$dir/should" && \
	ln -s $(abspath $(BIN)) "$$dir/should/$(BIN)" && $(MAKE) -C "$$dir/should" generate-proto generate-go sandbox-generate >/dev/null && rm "$$dir/should/$(BIN)" && \
	diff -ruN -x go.work.sum "$$dir/is" "$$dir/should" || { echo "generated files are not current: run make generate" >&2; exit 1; }

.PHONY: verify-schemas
verify-schemas: $(VALUES_SCHEMA)
	@echo "verify: schemas of the charts' values"
	@schema=$$(mktemp) && trap 'rm -f "$$schema"' EXIT && for chart in $(VALUES_OF); do \
		$(VALUES_SCHEMA) $$chart "$$schema" && diff -u $$chart/values.schema.json "$$schema" || \
			{ echo "$$chart/values.schema.json is not current: run make generate" >&2; exit 1; }; \
	done

.PHONY: verify-docs
verify-docs: $(OPTIONS_DOCS) $(METRICS_DOCS) $(VALUES_DOCS) $(CRD_DOCS) $(OPTIONS_BINARIES)
	@echo "verify: docs/options.md, docs/metrics.md, docs/values.md, docs/objects.md"
	@page=$$(mktemp) && trap 'rm -f "$$page"' EXIT && $(OPTIONS_DOCS) "$$page" $(OPTIONS_OF) && diff -u docs/options.md "$$page" && \
	$(METRICS_DOCS) "$$page" $(METRICS_OF) && diff -u docs/metrics.md "$$page" && \
	$(VALUES_DOCS) "$$page" $(VALUES_OF) && diff -u docs/values.md "$$page" && \
	$(CRD_DOCS) "$$page" $(OBJECTS_OF) && diff -u docs/objects.md "$$page" || \
		{ echo "a page of options, metrics, values or objects is not current: run make generate" >&2; exit 1; }

# The Go project's database, the newest that the module proxy has: a check of the same commit may fail tomorrow.
.PHONY: vuln
vuln: $(GOVULNCHECK) $(JQ) ## Check the code that the agent, the shim and the public packages call for known vulnerabilities
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && database=$$(cd "$$dir" && GOWORK=off go mod download -json golang.org/x/vulndb@latest) && \
	echo "vuln: $$($(JQ) -r '.Path + " " + .Version' <<<"$$database")" && \
	(cd "$$dir" && GOWORK=off go run golang.org/x/vulndb/cmd/indexdb@latest -vulns "$$($(abspath $(JQ)) -r .Dir <<<"$$database")/data/osv" -out "$$dir/db") && \
	for module in agent shim pkg pkg/tracing proto; do \
		echo "vuln: $$module" && (cd $$module && $(abspath $(GOVULNCHECK)) -db "file://$$dir/db" ./...) || { echo "vuln: FAIL $$module"; exit 1; }; \
	done && echo "vuln: PASS"

.PHONY: sbom
sbom: $(CYCLONEDX) ## Write the software bills of materials of the commands of a release, as CycloneDX, to bin/sbom
	@mkdir -p $(BIN)/sbom && for binary in $(RELEASE_COMMANDS) shim/cmd/kubectl-capi; do \
		(cd "$${binary%%/*}" && $(abspath $(CYCLONEDX)) app -json -licenses -std -main "$${binary#*/}" \
			-output $(abspath $(BIN))/sbom/"$${binary##*/}".cdx.json .) || exit 1; \
		echo "sbom: $(BIN)/sbom/$${binary##*/}.cdx.json"; \
	done

.PHONY: docs-site
docs-site: $(HUGO) ## Build the documentation as a site, in bin/docs-site; fails for a broken link (hugo takes minutes to build, once)
	@log=$$($(HUGO) build --source deploy/docs-site --destination $(abspath $(BIN))/docs-site --cleanDestinationDir --panicOnWarning 2>&1) || \
		{ grep -E '^(ERROR|panic|WARN)' <<<"$$log"; echo "docs-site: FAIL"; exit 1; }; \
	echo "docs-site: PASS pages=$$(find $(BIN)/docs-site -name '*.html' | wc -l) $(BIN)/docs-site/index.html"

# What others import has no replace directives; `go install` rejects them. Its own modules are looked for here, not where they are published.
.PHONY: verify-modules
verify-modules:
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && \
	for module in $(MODULES) $(patsubst %/main.go,%,$(wildcard deploy/tools/*/main.go)); do \
		echo "verify: $$module/go.mod"; flags=; \
		if [ $$module = pkg ]; then \
			cp $$module/go.mod $$module/go.sum "$$dir"; flags="-modfile=$$dir/go.mod"; \
			go mod edit -replace=github.com/karpenter-capi/karpenter-capi/proto=$(abspath proto) "$$dir/go.mod"; \
		fi; \
		(cd $$module && GOWORK=off go mod tidy -diff $$flags) || { echo "run go mod tidy in $$module" >&2; exit 1; }; \
	done

# The workspace hides that pkg/go.mod requires a commit of proto that is too old.
.PHONY: verify-required
verify-required:
	@echo "verify: pkg builds with the commit of proto that it requires"
	@out=$$(go test ./test/foreign -run='^TestAForeignModuleBuildsFromFewModules$$' 2>&1) || { echo "$$out" >&2; exit 1; }

# No commit can name itself, so this is for the commit after one that has changed the protos.
.PHONY: require-proto
require-proto: ## Make pkg/go.mod require the newest commit that changed proto/, for other repositories that import pkg
	@go run ./test/foreign/require

# The API as it was last agreed on. What is in it may be added to, and not changed: callers of any later build rely on it.
API_BASELINE := proto/baseline.binpb

.PHONY: verify-api
verify-api: $(BUF)
	@echo "verify: the API is compatible with $(API_BASELINE)"
	@image=$$(mktemp --suffix=.binpb) && trap 'rm -f "$$image"' EXIT && \
	$(BUF) build proto -o "$$image" && $(BUF) breaking "$$image" --against $(API_BASELINE)

.PHONY: api-baseline
api-baseline: $(BUF) verify-api ## Make the current API the baseline with which later changes must be compatible
	$(BUF) build proto --exclude-source-info -o $(API_BASELINE)

# What a module must not even import through others; golangci-lint's depguard says it for direct imports.
.PHONY: verify-imports
verify-imports:
	@$(call must_not_import,proto,k8s.io/ sigs.k8s.io/)
	@$(call must_not_import,pkg,sigs.k8s.io/cluster-api sigs.k8s.io/karpenter go.opentelemetry.io/)
	@$(call must_not_import,pkg/tracing,k8s.io/ sigs.k8s.io/)
	@$(call must_not_import,agent,sigs.k8s.io/karpenter)
	@$(call must_not_import,shim,sigs.k8s.io/cluster-api)

# $(call must_not_import,<module>,<import path prefixes>)
define must_not_import
echo "verify: imports of $(1)"; \
deps=$$(go list -test -deps -f '{{.ImportPath}}' ./$(1)/...); \
for prefix in $(2); do ! grep "^$$prefix" <<<"$$deps" || { echo "$(1) must not import $$prefix" >&2; exit 1; }; done
endef

.PHONY: lint
lint: lint-proto lint-go lint-charts ## Run the linters of the protos, the Go code and the charts

.PHONY: lint-proto
lint-proto: $(BUF)
	@echo "lint: protos"
	@$(BUF) lint

.PHONY: lint-go
lint-go: $(GOLANGCI_LINT)
	@echo "lint: Go"
	@CGO_ENABLED=0 $(GOLANGCI_LINT) run $(PACKAGES)

.PHONY: lint-charts
lint-charts: $(HELM)
	@for values in deploy/charts/*/ci/*-values.yaml; do \
		echo "lint: $${values%%/ci/*} with $${values##*/}"; $(HELM) lint --strict --quiet --values "$$values" "$${values%%/ci/*}"; \
	done

##@ Sandbox

# The sandbox's name: several can run at once.
SANDBOX ?= default
# What a sandbox runs, and with it what its user needs.
SANDBOX_PROCESSES = $(addprefix $(BIN)/,sim-provider capi-agent karpenter) $(SANDBOX_CONTROL_PLANES) $(SANDBOX_CAPI_MANIFESTS) $(HELM)
SANDBOX_BINARIES = $(SANDBOX_PROCESSES) $(addprefix $(BIN)/,sandbox kubectl-capi) $(SANDBOX_CLIENTS) $(GRPCURL) $(JQ)

.PHONY: sandbox-up
sandbox-up: $(SANDBOX_BINARIES) ## Bring a hub and a spoke up on this machine, and print example commands (SANDBOX=name for another sandbox, HUB=default for a second spoke of that sandbox's hub; TOPOLOGY=joined, sidecar or hub-hosted)
	@$(BIN)/sandbox up --name=$(SANDBOX) $(addprefix --topology=,$(TOPOLOGY)) $(addprefix --hub-of=,$(HUB))

.PHONY: sandbox-status
sandbox-status: $(BIN)/sandbox ## Show what runs in the sandbox
	@$(BIN)/sandbox status --name=$(SANDBOX)

.PHONY: sandbox-down
sandbox-down: $(BIN)/sandbox ## Take the sandbox down
	@$(BIN)/sandbox down --name=$(SANDBOX)

.PHONY: demo
demo: $(SANDBOX_PROCESSES) $(BIN)/demo ## Show how pods lead to nodes, and how nodes are removed again; CHAOS=1 kills shim and agent meanwhile
	@$(BIN)/demo $(DEMO_FLAGS)
DEMO_FLAGS ?=

##@ Test

# All of them run even if one fails.
.PHONY: test
test: ## Check and test everything: verify, test-unit, test-tools, test-e2e
	@results=$$(mktemp); trap 'rm -f "$$results"' EXIT; failed=; start=$$(date +%s); \
	for suite in verify test-unit test-tools test-e2e; do $(MAKE) $$suite RESULTS="$$results" || failed+=" $$suite"; done; \
	verdict="$${failed:+FAIL:$$failed;}"; $(call tally,test,$${verdict:-PASS},$$start,$$results); test -z "$$failed"

# The test cache knows the files that a test reads in its module, and the variables that it reads. A test that uses files from elsewhere reads the
# variable with their digest: charts, with the tools that render and serve them; pages; the few pages that tests of several minutes compare with;
# sources of the binaries that run in a sandbox; everything; the commit, whose history is tested.
TESTED = TESTED_CHARTS=$$($(call digest,deploy/charts deploy/tools test/charts/testdata)) \
	TESTED_DOCS=$$($(call digest,README.md docs .github)) \
	TESTED_REFERENCE=$$($(call digest,docs/access.md docs/install.md docs/limits.md docs/options.md docs/security.md)) \
	TESTED_BINARIES=$$($(call digest,agent deploy pkg proto shim go.work Makefile,! -name '*_test.go' ! -path 'deploy/docs-site/*')) \
	TESTED_FILES=$$($(call digest,agent deploy pkg proto shim test/claimmodel test/go.mod test/go.sum go.work README.md docs .github Makefile)) \
	TESTED_COMMIT=$(COMMIT)

# $(call digest,<files and folders>,<conditions of find>)
digest = find $(1) -type f $(2) -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c-16

# What the test of the images needs beside what a sandbox runs.
IMAGE_TEST_BINARIES = $(RELEASER) $(BIN)/fake-agent $(BIN)/capi-agent-conformance

# Some of these bring up sandboxes of their own, hence all the binaries.
.PHONY: test-unit
test-unit: $(GOTESTSUM) $(SANDBOX_BINARIES) $(IMAGE_TEST_BINARIES) ## Unit and integration tests of every module, with the race detector
	@export $(TESTED); \
	$(call go_test,$@,-timeout 30m $(LONGEST) $$(go list $(PACKAGES) | grep -v /test/e2e),-timeout 20m -run '$(UNRACED)' $(UNRACED_IN))

# These begin first, so that none of them is the last one, alone.
LONGEST := $(addprefix ./,agent/internal/agent test/charts test/abuse test/claimmodel/internal/crosscheck test/pages test/cost test/chaos agent/internal/claims \
	shim/cmd/karpenter)

# Tests that skip themselves under the race detector.
UNRACED    := ^(TestThousandsOfClaimsAndReleasesAtOnce|TestEveryMutantCompiles|TestProtocolAgainstAdversary|TestProtocolAgainstMoves|TestProtocolAgainstClocks|TestProtocolAgainstInPlaceUpdates|TestEveryPointOfACourse|TestALateMachineComesInTheEnd|TestAMachineThatNeverComesIsGivenUpInTheEnd)$$
UNRACED_IN := ./agent/internal/claims ./agent/internal/claims/mutants

TESTED_TOOLS := $(sort $(dir $(wildcard deploy/tools/*/*_test.go)))

.PHONY: test-tools
test-tools: $(GOTESTSUM) $(HELM) ## Tests of the tools that build releases and documentation
	@start=$$(date +%s); verdict=PASS; results=$$(mktemp -d); trap 'rm -rf "$$results"' EXIT; \
	for tool in $(TESTED_TOOLS); do \
		(cd $$tool && GOWORK=off CGO_ENABLED=0 $(abspath $(GOTESTSUM)) --format pkgname --jsonfile "$$results/$$(basename $$tool)" -- $(TEST_FLAGS) ./...) || \
			verdict=FAIL; \
	done; \
	cat "$$results"/* >"$$results/all"; if [ -n "$(RESULTS)" ]; then cat "$$results/all" >>"$(RESULTS)"; fi; \
	$(call tally,$@,$$verdict,$$start,$$results/all); test $$verdict = PASS

# The tests that have a short form, all of them: a batch of others would bring a sandbox up for nothing.
SHORT_E2E := TestTheHubRefusesUnintendedWrites TestBadDescriptionsOfNodeGroupsAreReportedAndDoNotAffectOthers \
	TestBadCallsAreRefusedWithTheFieldNamed TestNodeClaimsGoWithTheirMachines TestTwentyNodesAgainstClusterAPIAlone \
	TestChartsAreAcceptedByTheClustersTheyAreFor TestPodsBecomeNodesAlthoughShimAndAgentAreKilled TestNodesThatWaitForClusterAPIArePlannedOnce \
	TestNodesSurviveWhateverIsDoneToThem TestEveryServerListensOnLoopbackOnly TestListenersAreSeen TestAMoveToAnotherHubLosesNothing \
	TestNothingIsLostWhileTheHubIsAway TestNodesOfTheOtherProviderItselfAreTakenOver TestNodesOfAnotherProviderAreTakenOver
empty :=
space := $(empty) $(empty)

.PHONY: test-e2e
test-e2e: E2E = ^($(subst $(space),|,$(SHORT_E2E)))$$
test-e2e: $(GOTESTSUM) $(SANDBOX_BINARIES) ## A short end-to-end test: the demo's path, with processes killed on the way
	@$(call e2e_test,$@,4,-test.short -test.timeout 25m)

.PHONY: e2e
e2e: $(GOTESTSUM) $(SANDBOX_BINARIES) $(SANDBOX_ETCD_TOOLS) $(KUBE_STATE_METRICS) $(BIN)/capi-agent-conformance ## All end-to-end tests; more than two hours (E2E='Upgraded|Restore' for some of them)
	@$(call e2e_test,$@,1,-test.timeout 60m)

# A binary of the cluster-autoscaler, built with the provider externalgrpc: TestAClusterAutoscalerScales then runs it instead of a client that makes
# the same calls. Its module is not on the proxy; docs/cluster-autoscaler.md says how to build it.
CLUSTER_AUTOSCALER ?=

# The revision whose shim and agent TestTheVersionBeforeIsCompatible runs with those of this one. Empty: the newest release, or the commit before this one.
SKEW_FROM ?=

# A regular expression: which end-to-end tests.
E2E ?= .
# How many of them run at once. Most wait more than they compute; of the whole suite, a few keep both cores busy for minutes.
E2E_LANES ?= 3
e2e: E2E_LANES = 2
# A regular expression: which of them run by themselves, after the others, as they keep both cores busy or compare durations.
E2E_ALONE ?=
e2e: E2E_ALONE = TestAHundredPodsGetAHundredNodes|TestManyNodesAreTakenOver|TestNodesSurviveWhateverIsDoneToThem|TestPodsFitTheNodesThatWerePlannedForThem|TestTwentyNodesAgainstClusterAPIAlone

# $(call e2e_test,<name>,<tests in a batch>,<flags of the test binary>): runs end-to-end tests, several batches at once, each in a sandbox of its own,
# shows what a batch says as it ends, and closes with the numbers.
define e2e_test
start=$$(date +%s); results=$$(mktemp -d); export results CLUSTER_AUTOSCALER=$(abspath $(CLUSTER_AUTOSCALER)) SKEW_FROM=$(SKEW_FROM); trap 'rm -rf "$$results"' EXIT; verdict=PASS; \
CGO_ENABLED=1 go test -c -race -o $(BIN)/e2e.test ./test/e2e; \
tests=$$($(BIN)/e2e.test -test.list '$(E2E)'); test -n "$$tests" || { echo "$(1): FAIL no test has a name like '$(E2E)'"; exit 1; }; \
one() { echo "$(1): $$1 begins: $$2"; cd test/e2e; E2E_SANDBOX="$$1" $(abspath $(GOTESTSUM)) --format standard-verbose \
	--jsonfile "$$results/$$1.json" --raw-command -- go tool test2json -t -p e2e $(abspath $(BIN))/e2e.test -test.v=test2json -test.run "$$2" $(3) \
	>"$$results/$$1.log" 2>&1; ended=$$?; flock "$$results" cat "$$results/$$1.log"; return $$ended; }; export -f one; \
lanes() { xargs -r -L 1 -P "$$1" bash -c 'one "$$0" "$$1"' || verdict=FAIL; }; \
batches=$$(xargs -n $(2) <<<"$$tests" | awk '{gsub(" ", "|"); printf "e2e-%02d ^(%s)$$\n", NR, $$0}'); alone='\^\(($(E2E_ALONE))\)\$$'; \
lanes $(E2E_LANES) < <(grep -vE "$$alone" <<<"$$batches"); lanes 1 < <(grep -E "$$alone" <<<"$$batches"); \
cat "$$results"/*.json >"$$results/all"; if [ -n "$(RESULTS)" ]; then cat "$$results/all" >>"$(RESULTS)"; fi; \
$(call tally,$(1),$$verdict,$$start,$$results/all); test $$verdict = PASS
endef

.PHONY: chaos
chaos: $(SANDBOX_BINARIES) $(BIN)/chaos ## Make every dependency of the product fail, and count what is lost; an hour and more (CHAOS_FLAGS='-scenarios=rollout')
	@$(BIN)/chaos $(CHAOS_FLAGS)
CHAOS_FLAGS ?=

.PHONY: abuse
abuse: $(SANDBOX_BINARIES) $(BIN)/abuse ## Attack the agent as a tenant with many Clusters while another's claims are measured; more than an hour (ABUSE_FLAGS='-attacks="lists" -tenants=5')
	@$(BIN)/abuse $(ABUSE_FLAGS)
ABUSE_FLAGS ?=

# Network namespaces, nftables rules and a tun device take root. All of them end with the program.
.PHONY: netchaos
netchaos: $(SANDBOX_BINARIES) $(BIN)/netchaos ## Degrade the network between shim and agents, and measure the effect; as root; half an hour (NETCHAOS_FLAGS='-scenarios=RTT')
	@$(BIN)/netchaos $(NETCHAOS_FLAGS)
NETCHAOS_FLAGS ?=

CORE_SUITES = regression disruption

.PHONY: core-suites
core-suites: $(SANDBOX_BINARIES) $(BIN)/core-suites $(patsubst %,$(BIN)/core-%.test,$(CORE_SUITES)) ## Karpenter core's own end-to-end suites against a sandbox; an hour and more (CORE_SUITES_FLAGS='-suites=disruption -focus=Drift')
	@$(BIN)/core-suites $(CORE_SUITES_FLAGS)
CORE_SUITES_FLAGS ?=

# From the module cache, in core's own module, whose tests need more than ours does.
$(BIN)/core-%.test: shim/go.mod
	@mkdir -p $(@D); start=$$(date +%s); (cd shim && go mod download sigs.k8s.io/karpenter) && \
	cd "$$(cd shim && go list -m -f '{{.Dir}}' sigs.k8s.io/karpenter)" && GOWORK=off go test -c -o $(abspath $@) ./test/suites/$* && \
	echo "built    $@ in $$(( $$(date +%s) - start )) s"

.PHONY: fake-agent
fake-agent: $(BIN)/fake-agent ## Serve a fake agent that plays a scenario (FAKE_AGENT_FLAGS='--plaintext-loopback --scenario=file.yaml')
	@$(BIN)/fake-agent $(FAKE_AGENT_FLAGS)
FAKE_AGENT_FLAGS ?= --plaintext-loopback

.PHONY: conformance
conformance: $(BIN)/capi-agent-conformance ## Check that an agent satisfies the API's contract (CONFORMANCE_FLAGS='--address=… --cluster=…'; docs/conformance.md)
	@$(BIN)/capi-agent-conformance $(CONFORMANCE_FLAGS)
CONFORMANCE_FLAGS ?=

.PHONY: model
model: ## Explore the claim protocol exhaustively in small models, and without each of its rules (MODEL_FLAGS='-only wiped')
	@go run ./test/claimmodel $(MODEL_FLAGS)
MODEL_FLAGS ?=

.PHONY: points
points: ## Run short scenarios of the claim engine with one fault, at every point where it can occur; minutes
	@go test -count=1 -timeout 2h -v -run '^TestEveryPointOfACourse$$' ./agent/internal/claims -points

.PHONY: mutants
mutants: ## Break the claim engine deliberately, one rule at a time, and check that a test fails for each (MUTANTS_FLAGS='-run=R5')
	@go run ./agent/internal/claims/mutants $(MUTANTS_FLAGS)
MUTANTS_FLAGS ?=

# Which fuzz targets, a regular expression, and for how long each. Their seeds are among the unit tests.
FUZZ ?= .
FUZZ_TIME ?= 30s

.PHONY: fuzz
fuzz: $(BIN)/etcd $(BIN)/kube-apiserver ## Fuzz every parser of input, above all the agent's handlers; half a minute for each target (FUZZ=Handlers FUZZ_TIME=10m)
	@verdict=PASS; targets=0; while IFS=: read -r file function; do \
		echo "fuzz: $${file%/*} $${function#func }"; targets=$$(( targets + 1 )); \
		go test -run '^$$' -fuzz "^$${function#func }$$" -fuzztime $(FUZZ_TIME) "./$${file%/*}" </dev/null || verdict=FAIL; \
	done < <(grep -rHoE '^func Fuzz[A-Za-z0-9_]*' --include='*_test.go' $(MODULES) | grep -E 'func Fuzz.*($(FUZZ))'); \
	test $$targets -gt 0 || { echo "fuzz: no target matches FUZZ=$(FUZZ)"; verdict=FAIL; }; \
	echo "fuzz: $$verdict targets=$$targets"; test $$verdict = PASS

.PHONY: bench
bench: $(SANDBOX_BINARIES) $(BIN)/bench ## Measure: catalogues, claims per second, the agent's memory and start, and machines through claims against replicas raised by hand (BENCH_FLAGS='-rounds=5')
	@go test -run '^$$' -bench . ./shim/internal/catalogue ./agent/internal/nodegroupview
	@go test -run '^$$' -bench . ./agent/protocol ./agent/internal/claims
	@go test -run '^$$' -bench . -benchtime 300x -timeout 20m ./agent/internal/agent
	@go test -run Footprint -v -count 1 -timeout 20m ./agent/internal/agent -args -machines=10000 -ended=10000 -rounds=3
	@go test -run ManyClusters -v -count 1 -timeout 20m ./agent/internal/agent -args -clusters=200 -apart
	@go test -run ManyClusters -v -count 1 -timeout 20m ./agent/internal/agent -args -clusters=200 -claims=1
	@go test -run ManySpokesComeBack -v -count 1 -timeout 20m ./agent/internal/agent -args -spokes=1000 -herd-machines=10000
	@go test -run ManyMachinesAreAdopted -v -count 1 -timeout 20m ./agent/internal/agent -args -adopting=250
	@$(BIN)/bench $(BENCH_FLAGS)
BENCH_FLAGS ?=

.PHONY: access-matrix
access-matrix: $(SANDBOX_BINARIES) ## Call every method of the agent as every kind of caller, over the network; shows who may call what, and writes docs/access.md
	@go test -run '^TestAccessMatrix$$' -count=1 ./agent/internal/agent -args -write-matrix && cat docs/access.md && echo "access-matrix: PASS" || \
		{ echo "access-matrix: FAIL"; exit 1; }

.PHONY: dashboards
dashboards: $(SANDBOX_BINARIES) $(BIN)/dashboards ## Make the pictures of the charts' dashboards in docs/images anew, from a run of the demo's scenario; fails for an empty panel; five minutes
	@$(BIN)/dashboards

.PHONY: many-nodes
many-nodes: $(SANDBOX_BINARIES) $(BIN)/many-nodes ## Measure the cost of a spoke with 1,000 nodes, at rest and while 100 are removed; twenty minutes (MANY_NODES_FLAGS='-nodes=5000 -terminate=500' on a larger machine)
	@$(BIN)/many-nodes $(MANY_NODES_FLAGS)
MANY_NODES_FLAGS ?=

# More flags for go test, for example TEST_FLAGS='-run Catalogue -v'.
TEST_FLAGS ?=
# A file to add the results to.
RESULTS ?=

# $(call go_test,<name>,<flags and packages>,<the same, of tests to run without the race detector>): runs tests, shows each package as it ends, and
# closes with the numbers. The linter vets the same packages. Without GORACE, each package waits a second at its end for races that nobody reports.
define go_test
echo "$(1): go test $(TEST_FLAGS)"; results=$$(mktemp); trap 'rm -f "$$results"' EXIT; verdict=PASS; start=$$(date +%s); \
GORACE=atexit_sleep_ms=50 CGO_ENABLED=1 \
	$(GOTESTSUM) --format pkgname --format-hide-empty-pkg --jsonfile "$$results" -- -race -vet=off $(TEST_FLAGS) $(2) || verdict=FAIL; \
more=$$(mktemp); CGO_ENABLED=0 $(GOTESTSUM) --format pkgname --format-hide-empty-pkg --jsonfile "$$more" -- $(TEST_FLAGS) $(3) || verdict=FAIL; \
cat "$$more" >>"$$results"; rm "$$more"; \
if [ -n "$(RESULTS)" ]; then cat "$$results" >>"$(RESULTS)"; fi; \
$(call tally,$(1),$$verdict,$$start,$$results); test $$verdict = PASS
endef

# $(call tally,<name>,<verdict>,<start>,<file of test events>): one line about them.
define tally
awk -v name=$(1) -v verdict="$(2)" -v seconds=$$(( $$(date +%s) - $(3) )) \
	'/"Test":/ {if (/"Action":"pass"/) passed++; else if (/"Action":"fail"/) failed++; else if (/"Action":"skip"/) skipped++} \
	END {printf "%s: %s %d passed, %d failed, %d skipped, seconds=%d\n", name, verdict, passed, failed, skipped, seconds}' "$(4)"
endef
