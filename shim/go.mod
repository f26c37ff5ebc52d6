module github.com/karpenter-capi/karpenter-capi/shim

go 1.26.9

require (
	github.com/karpenter-capi/karpenter-capi/pkg v0.0.0
	github.com/karpenter-capi/karpenter-capi/proto v0.0.0
	google.golang.org/grpc v1.85.0
	google.golang.org/protobuf v1.36.12
	k8s.io/api v0.36.3
	k8s.io/apimachinery v0.36.3
	k8s.io/client-go v0.36.3
	sigs.k8s.io/controller-runtime v0.24.1
	sigs.k8s.io/karpenter v1.15.0
)

replace (
	github.com/karpenter-capi/karpenter-capi/pkg => ../pkg
	github.com/karpenter-capi/karpenter-capi/proto => ../proto
)
