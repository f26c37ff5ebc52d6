# Foreign binaries of the sandbox, built from Go modules alone: no container, no download but the Go module proxy.
# Each comes from a small module of its own under deploy/tools, outside the workspace. What several of them require is pinned to
# one version in all, and in the workspace, so that it is compiled once (test/pins). A binary is rebuilt when its module's go.mod or go.sum
# changes. Included by the top-level Makefile.

BIN ?= bin

SANDBOX_K8S_VERSION  = $(shell sed -n 's/^\t*k8s.io\/kubernetes \(v[0-9.]*\).*/\1/p' deploy/tools/kubernetes/go.mod)
SANDBOX_CAPI_VERSION = $(shell sed -n 's/^\t*sigs.k8s.io\/cluster-api \(v[0-9.]*\).*/\1/p' deploy/tools/cluster-api/go.mod)
SANDBOX_KWOK_VERSION = $(shell sed -n 's/^\t*sigs.k8s.io\/kwok \(v[0-9.]*\).*/\1/p' deploy/tools/kwok/go.mod)

# Cluster API refuses a server that reports v0.0.0, which is what an unstamped one does.
SANDBOX_K8S_LDFLAGS = $(foreach pkg,k8s.io/component-base/version k8s.io/client-go/pkg/version, \
	-X $(pkg).gitVersion=$(SANDBOX_K8S_VERSION) \
	-X $(pkg).gitMajor=$(word 1,$(subst ., ,$(SANDBOX_K8S_VERSION:v%=%))) \
	-X $(pkg).gitMinor=$(word 2,$(subst ., ,$(SANDBOX_K8S_VERSION:v%=%))) \
	-X $(pkg).gitTreeState=clean)

# For those who put a snapshot of a control plane back; a sandbox by itself needs neither.
SANDBOX_ETCD_TOOLS          := $(addprefix $(BIN)/,etcdctl etcdutl)
SANDBOX_KUBERNETES_BINARIES := $(addprefix $(BIN)/,kube-apiserver kube-controller-manager kube-scheduler kubectl)
# What a sandbox runs, and what only its users and some tests run.
SANDBOX_CONTROL_PLANES      := $(addprefix $(BIN)/,etcd kube-apiserver kube-controller-manager kube-scheduler capi-core-manager kwok)
SANDBOX_CLIENTS             := $(addprefix $(BIN)/,kubectl clusterctl)
SANDBOX_FOREIGN_BINARIES    := $(SANDBOX_CONTROL_PLANES) $(SANDBOX_CLIENTS)
# What belongs to the manager binary, from the same module: its CRDs and webhook configurations, its version, and the CRD of
# clusterctl's inventory.
SANDBOX_CAPI_MANIFESTS      := $(BIN)/capi-core-manifests/.stamp

# $(call sandbox_build,<module folder>,<package>,<ldflags>): builds $@, saying what and how long.
define sandbox_build
	@mkdir -p $(@D); echo "building $@ (minutes on a cold cache)"; \
	start=$$(date +%s); out=$(abspath $@); \
	(cd $(1) && GOWORK=off GOFLAGS='$(BUILD_FLAGS)' CGO_ENABLED=0 \
		go build -ldflags '-s -w $(3)' -o "$$out.tmp" $(2)) && mv "$$out.tmp" "$$out" && \
	echo "built    $@ in $$(( $$(date +%s) - start )) s"
endef

$(BIN)/etcd: deploy/tools/etcd/go.mod deploy/tools/etcd/go.sum
	$(call sandbox_build,deploy/tools/etcd,go.etcd.io/etcd/server/v3)

$(SANDBOX_ETCD_TOOLS): deploy/tools/etcd/go.mod deploy/tools/etcd/go.sum
	$(call sandbox_build,deploy/tools/etcd,go.etcd.io/etcd/$(@F)/v3)

$(SANDBOX_KUBERNETES_BINARIES): deploy/tools/kubernetes/go.mod deploy/tools/kubernetes/go.sum
	$(call sandbox_build,deploy/tools/kubernetes,k8s.io/kubernetes/cmd/$(@F),$(SANDBOX_K8S_LDFLAGS))

# The manager's webhook server listens on every interface and has no flag for that, and nothing of the sandbox may be
# reachable from outside. So its main.go is compiled from a copy with this one option set. The module path lets the
# copy import Cluster API's internal packages, as the original does.
SANDBOX_CAPI_SOURCE := $(BIN)/capi-core-manager.src

$(BIN)/capi-core-manager: deploy/tools/cluster-api/go.mod deploy/tools/cluster-api/go.sum
	@rm -rf $(SANDBOX_CAPI_SOURCE) && mkdir -p $(SANDBOX_CAPI_SOURCE) && cp $^ $(SANDBOX_CAPI_SOURCE)/ && cd $(SANDBOX_CAPI_SOURCE) && \
	export GOWORK=off GOFLAGS='$(BUILD_FLAGS)' && go mod edit -module sigs.k8s.io/cluster-api/loopback && \
	dir=$$(go mod download -json sigs.k8s.io/cluster-api@$(SANDBOX_CAPI_VERSION) | sed -n 's/.*"Dir": "\(.*\)",/\1/p') && \
	sed 's/^\(\t*\)Port: *webhookPort,$$/\1Host: "127.0.0.1",\n&/' "$$dir/core/main.go" > main.go && \
	{ test "$$(grep -c 'Host: "127.0.0.1",' main.go)" = 1 || { echo "cannot bind the webhook server to loopback: core/main.go has changed" >&2; exit 1; }; }
	$(call sandbox_build,$(SANDBOX_CAPI_SOURCE),.,-X sigs.k8s.io/cluster-api/version.gitVersion=$(SANDBOX_CAPI_VERSION))
	@rm -rf $(SANDBOX_CAPI_SOURCE)

# Moves what Cluster API has from one hub to another; of the manager's module, so that the two always fit.
$(BIN)/clusterctl: deploy/tools/cluster-api/go.mod deploy/tools/cluster-api/go.sum
	$(call sandbox_build,deploy/tools/cluster-api,sigs.k8s.io/cluster-api/cmd/clusterctl,-X sigs.k8s.io/cluster-api/version.gitVersion=$(SANDBOX_CAPI_VERSION))

$(BIN)/kwok: deploy/tools/kwok/go.mod deploy/tools/kwok/go.sum
	$(call sandbox_build,deploy/tools/kwok,sigs.k8s.io/kwok/cmd/kwok,-X sigs.k8s.io/kwok/pkg/consts.Version=$(SANDBOX_KWOK_VERSION))

$(SANDBOX_CAPI_MANIFESTS): deploy/tools/cluster-api/go.mod deploy/tools/cluster-api/go.sum
	@mkdir -p $(@D)/crds && cd deploy/tools/cluster-api && \
	export GOWORK=off GOFLAGS='$(BUILD_FLAGS)' && go mod download sigs.k8s.io/cluster-api && \
	dir=$$(go list -m -f '{{.Dir}}' sigs.k8s.io/cluster-api) && cd $(CURDIR) && \
	install -m 0644 "$$dir"/core/config/crd/bases/*.yaml $(@D)/crds/ && \
	install -m 0644 "$$dir"/core/config/webhook/manifests.yaml $(@D)/webhooks.yaml && \
	mkdir -p $(@D)/inventory && install -m 0644 "$$dir"/cmd/clusterctl/config/manifest/*.yaml $(@D)/inventory/ && \
	echo $(SANDBOX_CAPI_VERSION) >$(@D)/version && touch $@
	@echo "copied   Cluster API $(SANDBOX_CAPI_VERSION) CRDs and webhook configurations to $(@D)"

# One after the other: they share most of their packages, which parallel builds would compile twice.
$(SANDBOX_ETCD_TOOLS): | $(BIN)/etcd
$(BIN)/kube-apiserver: | $(BIN)/etcd
$(BIN)/kube-controller-manager: | $(BIN)/kube-apiserver
$(BIN)/kube-scheduler: | $(BIN)/kube-controller-manager
$(BIN)/capi-core-manager: | $(BIN)/kube-scheduler
$(BIN)/kwok: | $(BIN)/capi-core-manager
$(BIN)/kubectl: | $(BIN)/kwok
$(BIN)/clusterctl: | $(BIN)/kubectl

.PHONY: sandbox-tools
sandbox-tools: $(SANDBOX_FOREIGN_BINARIES) $(SANDBOX_ETCD_TOOLS) $(SANDBOX_CAPI_MANIFESTS) ## Build the sandbox's control plane binaries (about six minutes cold)

.PHONY: sandbox-generate
sandbox-generate: $(BIN)/controller-gen ## Regenerate the simulated provider's CRDs and deep copies
	cd deploy/sandbox/api/v1alpha1 && GOWORK=off $(abspath $(BIN)/controller-gen) object crd paths=. output:crd:dir=crds
