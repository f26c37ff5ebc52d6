module github.com/karpenter-capi/karpenter-capi/test

go 1.26.9

require (
	github.com/karpenter-capi/karpenter-capi/pkg v0.0.0
	github.com/karpenter-capi/karpenter-capi/proto v0.0.0
)

replace (
	github.com/karpenter-capi/karpenter-capi/agent => ../agent
	github.com/karpenter-capi/karpenter-capi/deploy/sandbox => ../deploy/sandbox
	github.com/karpenter-capi/karpenter-capi/pkg => ../pkg
	github.com/karpenter-capi/karpenter-capi/proto => ../proto
	github.com/karpenter-capi/karpenter-capi/shim => ../shim
)
