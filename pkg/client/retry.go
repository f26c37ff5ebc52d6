package client

import (
	"encoding/json"

	"github.com/samber/lo"
	"google.golang.org/grpc"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// retried lists the unary calls that are repeated when the agent was unavailable: all of them are idempotent. SyncClaims is
// missing because its contract asks for a new token after UNAVAILABLE.
var retried = map[string][]string{
	agentv1alpha1.NodeGroupService_ServiceDesc.ServiceName: {"ListNodeGroups", "GetNodeGroup"},
	agentv1alpha1.ClaimService_ServiceDesc.ServiceName:     {"CreateClaim", "ReleaseClaim", "ReturnMachine", "GetClaim", "ListClaims"},
	agentv1alpha1.MachineService_ServiceDesc.ServiceName:   {"ListMachines", "GetMachine"},
	agentv1alpha1.StatusService_ServiceDesc.ServiceName:    {"GetStatus"},

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

// defaultServiceConfig returns gRPC's service config: at most four attempts within about two seconds, and none beyond the first
// while most calls fail anyway. All calls of a client go to one agent, as every agent has all there is, and calls that come together at one cost the
// hub less. Of several addresses the first is left to chance, so that clients spread.
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
		panic(err) // Strings and numbers marshal.
	}
	return string(config)
}

// WithRetry is the repetition of calls that [New] uses, and its choice of an agent where an address stands for several, for callers that make their
// own connection for [FromConn].
func WithRetry() grpc.DialOption { return grpc.WithDefaultServiceConfig(defaultServiceConfig()) }
