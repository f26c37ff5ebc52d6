module github.com/karpenter-capi/karpenter-capi/deploy/tools/options-docs

go 1.26.11
