# The tools that generate, check and talk to the product. Each comes from a small module of its own in deploy/tools, outside
# the workspace, so that its pins bind nothing of ours, and is rebuilt when that module changes.
# Included by the top-level Makefile.

BUF              := $(BIN)/buf
CONTROLLER_GEN   := $(BIN)/controller-gen
DESCRIPTORS      := $(BIN)/descriptors
GOLANGCI_LINT    := $(BIN)/golangci-lint
GOTESTSUM        := $(BIN)/gotestsum
GRPCURL          := $(BIN)/grpcurl
HELM             := $(BIN)/helm
HUGO             := $(BIN)/hugo
JQ               := $(BIN)/jq
KUBE_STATE_METRICS := $(BIN)/kube-state-metrics
PRINT_PROTO      := $(BIN)/print-proto
PROTOC_GEN_GO    := $(BIN)/protoc-gen-go
PROTOC_GEN_GRPC  := $(BIN)/protoc-gen-go-grpc
PROTOC_GEN_DOCS  := $(BIN)/protoc-gen-api-docs
OPTIONS_DOCS     := $(BIN)/options-docs
METRICS_DOCS     := $(BIN)/metrics-docs
VALUES_DOCS      := $(BIN)/values-docs
VALUES_SCHEMA    := $(BIN)/values-schema
CRD_DOCS         := $(BIN)/crd-docs
GOVULNCHECK      := $(BIN)/govulncheck
CYCLONEDX        := $(BIN)/cyclonedx-gomod
RELEASER         := $(BIN)/releaser

GENERATORS := $(BUF) $(CONTROLLER_GEN) $(DESCRIPTORS) $(PRINT_PROTO) $(PROTOC_GEN_GO) $(PROTOC_GEN_GRPC) \
              $(PROTOC_GEN_DOCS) $(OPTIONS_DOCS) $(METRICS_DOCS) $(VALUES_DOCS) $(VALUES_SCHEMA) $(CRD_DOCS)
TOOLS      := $(GENERATORS) $(GOLANGCI_LINT) $(GOTESTSUM) $(GRPCURL) $(HELM) $(JQ)

# $(call tool,<binary>,<module folder>,<package>[,<ldflags>]): the rule that builds a binary, saying what and how long.
define tool
$(1): deploy/tools/$(2)/go.mod $(wildcard deploy/tools/$(2)/go.sum deploy/tools/$(2)/*.go deploy/tools/$(2)/*.tmpl)
	@mkdir -p $$(@D); echo "building $$@"; start=$$$$(date +%s); out=$$(abspath $$@); \
	(cd deploy/tools/$(2) && GOWORK=off CGO_ENABLED=0 go build -ldflags '-s -w $(4)' -o "$$$$out.tmp" $(3)) && \
	mv "$$$$out.tmp" "$$$$out" && echo "built    $$@ in $$$$(( $$$$(date +%s) - start )) s"
endef

# $(call tool_version,<module folder>,<module>): the version of a module that a tools module pins.
tool_version = $(shell sed -n 's|^\t*$(2) \(v[^ ]*\).*|\1|p' deploy/tools/$(1)/go.mod)

# The Kubernetes minor version that helm assumes where it has no cluster to ask: that of its client-go.
helm_kubernetes_minor := $(word 2,$(subst ., ,$(call tool_version,helm,k8s.io/client-go)))

$(eval $(call tool,$(BUF),buf,github.com/bufbuild/buf/cmd/buf))
$(eval $(call tool,$(CONTROLLER_GEN),controller-gen,sigs.k8s.io/controller-tools/cmd/controller-gen))
$(eval $(call tool,$(DESCRIPTORS),descriptors,.))
$(eval $(call tool,$(GOLANGCI_LINT),golangci-lint,github.com/golangci/golangci-lint/v2/cmd/golangci-lint,\
	-X main.version=$(call tool_version,golangci-lint,github.com/golangci/golangci-lint/v2)))
$(eval $(call tool,$(GOTESTSUM),gotestsum,gotest.tools/gotestsum))
$(eval $(call tool,$(GRPCURL),grpcurl,github.com/fullstorydev/grpcurl/cmd/grpcurl,\
	-X main.version=$(call tool_version,grpcurl,github.com/fullstorydev/grpcurl)))
$(eval $(call tool,$(HELM),helm,helm.sh/helm/v3/cmd/helm,\
	-X helm.sh/helm/v3/internal/version.version=$(call tool_version,helm,helm.sh/helm/v3) \
	$(foreach package,chartutil lint/rules,$(foreach part,Major=1 Minor=$(helm_kubernetes_minor),\
		-X helm.sh/helm/v3/pkg/$(package).k8sVersion$(part)))))
$(eval $(call tool,$(HUGO),hugo,github.com/gohugoio/hugo))
$(eval $(call tool,$(JQ),jq,github.com/itchyny/gojq/cmd/gojq))
$(eval $(call tool,$(KUBE_STATE_METRICS),kube-state-metrics,k8s.io/kube-state-metrics/v2))
$(eval $(call tool,$(PRINT_PROTO),print-proto,.))
$(eval $(call tool,$(PROTOC_GEN_GO),protoc-gen-go,google.golang.org/protobuf/cmd/protoc-gen-go))
$(eval $(call tool,$(PROTOC_GEN_GRPC),protoc-gen-go,google.golang.org/grpc/cmd/protoc-gen-go-grpc))
$(eval $(call tool,$(PROTOC_GEN_DOCS),api-docs,.))
$(eval $(call tool,$(OPTIONS_DOCS),options-docs,.))
$(eval $(call tool,$(METRICS_DOCS),metrics-docs,.))
$(eval $(call tool,$(VALUES_DOCS),values-docs,.))
$(eval $(call tool,$(VALUES_SCHEMA),values-schema,.))
$(eval $(call tool,$(CRD_DOCS),crd-docs,.))
$(eval $(call tool,$(GOVULNCHECK),supply-chain,golang.org/x/vuln/cmd/govulncheck))
$(eval $(call tool,$(CYCLONEDX),supply-chain,github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod))
$(eval $(call tool,$(RELEASER),releaser,.))
