package client

import (
	"encoding/json"

	"github.com/samber/lo"
	"google.golang.org/grpc"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// retried lists the unary calls that are retried when the agent was unavailable. All of them are
// idempotent. SyncClaims is missing: its contract requires a new token after UNAVAILABLE.
var retried = map[string][]string{
	agentv1alpha1.NodeGroupService_ServiceDesc.ServiceName: {"ListNodeGroups", "GetNodeGroup"},
	agentv1alpha1.ClaimService_ServiceDesc.ServiceName:     {"CreateClaim", "ReleaseClaim", "ReturnMachine", "GetClaim", "ListClaims"},
	agentv1alpha1.MachineService_ServiceDesc.ServiceName:   {"ListMachines", "GetMachine"},
	agentv1alpha1.StatusService_ServiceDesc.ServiceName:    {"GetStatus"},
	agentv1alpha1.ClusterService_ServiceDesc.ServiceName:   {"ListClusters"},
	agentv1alpha1.NodePoolService_ServiceDesc.ServiceName:  {"ListPublishedObjects"},

	agentv1alpha1.CertificateService_ServiceDesc.ServiceName: {"IssueCertificate"},
}

type methodName struct {
	Service string `json:"service"`
	Method  string `json:"method"`
}

type retryPolicy struct {
	MaxAttempts          int      `json:"maxAttempts"`
	InitialBackoff       string   `json:"initialBackoff"`
	MaxBackoff           string   `json:"maxBackoff"`
	BackoffMultiplier    float64  `json:"backoffMultiplier"`
	RetryableStatusCodes []string `json:"retryableStatusCodes"`
}

type methodConfig struct {
	Name        []methodName `json:"name"`
	RetryPolicy retryPolicy  `json:"retryPolicy"`
}

type retryThrottling struct {
	MaxTokens  float64 `json:"maxTokens"`
	TokenRatio float64 `json:"tokenRatio"`
}

type pickFirst struct {
	ShuffleAddressList bool `json:"shuffleAddressList"`
}

type loadBalancing struct {
	PickFirst pickFirst `json:"pick_first"` //nolint:tagliatelle // gRPC's name
}

type serviceConfig struct {
	LoadBalancing   []loadBalancing `json:"loadBalancingConfig"`
	MethodConfig    []methodConfig  `json:"methodConfig"`
	RetryThrottling retryThrottling `json:"retryThrottling"`
}

// defaultServiceConfig returns gRPC's service config. A call is attempted at most four times within
// about two seconds, and only once while most calls fail anyway.
//
// All calls of a client go to one agent: every agent has all data, and the hub does less work for
// calls that arrive together at one agent. If there are several addresses, their order is shuffled,
// so that clients spread over the agents.
func defaultServiceConfig() string {
	names := lo.FlatMap(lo.Entries(retried), func(e lo.Entry[string, []string], _ int) []methodName {
		return lo.Map(e.Value, func(method string, _ int) methodName {
			return methodName{Service: e.Key, Method: method}
		})
	})
	config, err := json.Marshal(serviceConfig{
		LoadBalancing: []loadBalancing{{PickFirst: pickFirst{ShuffleAddressList: true}}},
		MethodConfig: []methodConfig{{
			Name: names,
			RetryPolicy: retryPolicy{
				MaxAttempts:          4,
				InitialBackoff:       "0.2s",
				MaxBackoff:           "1s",
				BackoffMultiplier:    2,
				RetryableStatusCodes: []string{"UNAVAILABLE"},
			},
		}},
		RetryThrottling: retryThrottling{MaxTokens: 20, TokenRatio: 0.1},
	})
	if err != nil {
		panic(err) // strings and numbers always marshal
	}
	return string(config)
}

// WithRetry returns the dial option for the retries and load balancing that [New] uses, for callers
// that make their own connection for [FromConn].
func WithRetry() grpc.DialOption { return grpc.WithDefaultServiceConfig(defaultServiceConfig()) }
