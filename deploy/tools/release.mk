# What a release consists of, docs/releases.md. Nothing here needs a container engine, and only `make publish` a registry.
# Included by the top-level Makefile.

RELEASE           := $(BIN)/release
RELEASE_PLATFORMS ?= linux/amd64 linux/arm64
# What the names of images, and of the folder of charts, begin with.
REGISTRY          ?= ghcr.io/karpenter-capi
# More flags for `make publish`, for example --insecure for a registry without TLS.
PUBLISH_FLAGS     ?=

# The commands in images, deploy/images/images.yaml.
RELEASE_COMMANDS  := agent/cmd/capi-agent shim/cmd/karpenter pkg/cmd/fake-agent pkg/cmd/capi-agent-conformance
# Those that people run outside an image, too; `make krew` makes the kubectl plugin's archives.
RELEASE_ARCHIVES  := capi-agent capi-agent-conformance fake-agent
# The binaries of a release differ from those in bin/: paths of the machine that built them are removed.
RELEASE_BINARIES  := $(BIN)/release-binaries

RELEASE_CREATED   = $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
RELEASE_FLAGS     = --version '$(VERSION)' --commit '$(COMMIT)' --created '$(RELEASE_CREATED)' --registry '$(REGISTRY)'
RELEASE_LAYOUTS   := $(RELEASE)/images
# An archive that depends on nothing but what is in it.
RELEASE_TAR       = tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@$(RELEASE_CREATED) --mode=a+rX,u+w,go-w

comma := ,
space := $(subst ,, )

##@ Release

.PHONY: images
images: $(RELEASER) ## Build the images as OCI layouts in bin/release/images, without a container engine (RELEASE_PLATFORMS=linux/amd64 REGISTRY=… VERSION=…)
	@for platform in $(RELEASE_PLATFORMS); do \
		dir=$(RELEASE_BINARIES)/$${platform//\//-}; mkdir -p "$$dir"; \
		for command in $(RELEASE_COMMANDS); do \
			GOOS=$${platform%%/*} GOARCH=$$(cut -d/ -f2 <<<"$$platform") CGO_ENABLED=0 GOFLAGS=-buildvcs=false \
				go build -trimpath -ldflags '$(LDFLAGS)' -o "$$dir/" "./$$command" || exit 1; \
		done; echo "binaries: $$dir"; \
	done
	@$(RELEASER) images $(RELEASE_FLAGS) --binaries $(RELEASE_BINARIES) --platforms $(subst $(space),$(comma),$(strip $(RELEASE_PLATFORMS))) --out $(RELEASE_LAYOUTS)

.PHONY: publish-images
publish-images: $(RELEASER) ## Push the images that `make images` has built, with the credentials of docker or podman login (same REGISTRY, VERSION and RELEASE_KEY)
	@$(RELEASER) push $(RELEASE_FLAGS) --layouts $(RELEASE_LAYOUTS) $(PUBLISH_FLAGS)

.PHONY: release
release: $(RELEASER) $(HELM) ## Build all parts of a release in bin/release, and publish nothing (VERSION=v0.1.0 REGISTRY=… RELEASE_KEY=key.pem)
	@start=$$(date +%s); rm -rf $(RELEASE) && mkdir -p $(RELEASE) && $(MAKE) images krew sbom && \
	if grep -qw "$$(go env GOHOSTOS)/$$(go env GOHOSTARCH)" <<<'$(RELEASE_PLATFORMS)'; then \
		RELEASE_IMAGES=$(abspath $(RELEASE_LAYOUTS)) RELEASE_VERSION='$(VERSION)' go test -count=1 ./test/images -run '^TestImagesRun$$/^versions$$' || \
			{ echo "release: FAIL the commands of the images do not run, or do not report $(VERSION)"; exit 1; }; \
	fi && \
	for platform in $(RELEASE_PLATFORMS); do for command in $(RELEASE_ARCHIVES); do \
		name=$${platform//\//-}; dir=$$(mktemp -d); cp LICENSE $(RELEASE_BINARIES)/$$name/$$command "$$dir"; \
		$(RELEASE_TAR) -c -C "$$dir" LICENSE $$command | gzip -n >$(RELEASE)/$$command-$$name.tar.gz; rm -r "$$dir"; \
	done; done && \
	for layout in $(RELEASE_LAYOUTS)/*; do $(RELEASE_TAR) -c -f $(RELEASE)/image-$${layout##*/}.tar -C $$layout .; done && \
	for chart in deploy/charts/*; do \
		for crd in $$chart/files/crds/*.yaml; do echo ---; grep -vx -e --- "$$crd"; done >$(RELEASE)/crds-$${chart##*/}.yaml; \
	done && \
	cp $(BIN)/krew/kubectl-capi-*.tar.gz $(RELEASE) && cp $(BIN)/krew/capi.yaml $(RELEASE)/krew-capi.yaml && cp $(BIN)/sbom/*.cdx.json $(RELEASE) && \
	$(RELEASER) charts $(RELEASE_FLAGS) --layouts $(RELEASE_LAYOUTS) --helm $(HELM) --out $(RELEASE) && \
	$(RELEASER) changelog $(RELEASE_FLAGS) --out $(RELEASE)/CHANGELOG.md && \
	$(RELEASER) checksums $(RELEASE_FLAGS) --layouts $(RELEASE_LAYOUTS) --dir $(RELEASE) && \
	(cd $(RELEASE) && sha256sum --quiet --check SHA256SUMS && find . -maxdepth 1 -type f -printf '%10s  %f\n' | LC_ALL=C sort -k 2 && cat images.txt) && \
	echo "release: PASS $(VERSION), $$(grep -c . $(RELEASE)/SHA256SUMS) files, $(words $(RELEASE_PLATFORMS)) platforms, seconds=$$(( $$(date +%s) - start ))"

.PHONY: publish
publish: $(RELEASER) $(HELM) ## Push the images and the charts that `make release` has built (same REGISTRY, VERSION and RELEASE_KEY)
	@$(RELEASER) push $(RELEASE_FLAGS) --layouts $(RELEASE_LAYOUTS) --charts $(RELEASE) --helm $(HELM) $(PUBLISH_FLAGS)

.PHONY: github-release
github-release: ## Create the release on GitHub, with the files in bin/release; needs gh and its token
	gh release create '$(VERSION)' --verify-tag --title '$(VERSION)' --notes-file $(RELEASE)/CHANGELOG.md $$(find $(RELEASE) -maxdepth 1 -type f)
