# What the top Makefile needs to know about the shim.

.PHONY: generate-shim
generate-shim: $(CONTROLLER_GEN) ## Write the shim's deep copies, its CRD, and beside it the CRDs of the Karpenter core that it is built with
	cd shim && $(abspath $(CONTROLLER_GEN)) object crd paths=./apis/... output:crd:dir=../deploy/charts/shim/crds
	core=$$(cd shim && GOFLAGS=-mod=readonly go list -m -f '{{.Dir}}' sigs.k8s.io/karpenter) && \
	install -m 644 "$$core"/pkg/apis/crds/*.yaml deploy/charts/shim/crds/
