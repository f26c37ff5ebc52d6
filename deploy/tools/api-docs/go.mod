module github.com/karpenter-capi/karpenter-capi/deploy/tools/api-docs

go 1.26.11

require (
	buf.build/gen/go/bufbuild/protovalidate/protocolbuffers/go v1.36.12-20260825204119-511051f7f437.1
	google.golang.org/protobuf v1.36.12
)
