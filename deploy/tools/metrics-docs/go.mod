module github.com/karpenter-capi/karpenter-capi/deploy/tools/metrics-docs

go 1.26.11
