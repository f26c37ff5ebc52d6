module github.com/karpenter-capi/karpenter-capi/deploy/tools/crd-docs

go 1.26.11

require go.yaml.in/yaml/v3 v3.0.4
