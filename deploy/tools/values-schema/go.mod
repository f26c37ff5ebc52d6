module github.com/karpenter-capi/karpenter-capi/deploy/tools/values-schema

go 1.26.11

require (
	github.com/google/jsonschema-go v0.4.3
	go.yaml.in/yaml/v3 v3.0.4
)
