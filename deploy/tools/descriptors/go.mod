module github.com/karpenter-capi/karpenter-capi/deploy/tools/descriptors

go 1.26.11

require (
	google.golang.org/genproto/googleapis/rpc v0.0.0-20261019180522-ce908d29299b
	google.golang.org/protobuf v1.36.12
)
