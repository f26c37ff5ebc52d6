package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox/internal/process"
)

// Phase is a phase in a sandbox's life.
type Phase string

// The phases, in order. A sandbox that failed has already been stopped.
const (
	Starting Phase = "Starting"
	Ready    Phase = "Ready"
	Stopping Phase = "Stopping"
	Failed   Phase = "Failed"
)

// State is the state of a sandbox. It is stored in state.json.
type State struct {
	Name  string `json:"name"`
	Phase Phase  `json:"phase"`
	// Error is the reason of a failure.
	Error string `json:"error,omitempty"`
	// Cluster is the name of the spoke's Cluster in the namespace [ClusterNamespace]; empty without
	// a spoke.
	Cluster string `json:"cluster,omitempty"`
	// PID is the process that holds the sandbox.
	PID int `json:"pid"`
	// StartedAt is when the start was requested. ReadyAt is when the sandbox was first ready, zero
	// before.
	StartedAt time.Time `json:"startedAt"`
	ReadyAt   time.Time `json:"readyAt,omitzero"`
	// Steps are the steps of the start, in the order in which they began. Some run concurrently.
	Steps []Step `json:"steps"`
	// Components are in the order in which they were started.
	Components []ComponentStatus `json:"components"`
	// AgentAddress is the host:port at which the agent serves gRPC. Empty without an agent.
	AgentAddress string `json:"agentAddress,omitempty"`
	// AgentAddresses are the addresses of all agents. The first is AgentAddress.
	AgentAddresses []string `json:"agentAddresses,omitempty"`
	// AgentMetrics is the URL of the agent's metrics. Empty without an agent.
	AgentMetrics string `json:"agentMetrics,omitempty"`
	// MetricsOfAgents are the URLs of the metrics of all agents, by the agents' names. Nil without
	// an agent, and if the agents are another sandbox's.
	MetricsOfAgents map[string]string `json:"metricsOfAgents,omitempty"`
	// HubEtcdMetrics is the URL of the metrics of the hub's etcd.
	HubEtcdMetrics string `json:"hubEtcdMetrics,omitempty"`
	// ShimMetrics is the URL of the shim's metrics. Empty without a shim.
	ShimMetrics string `json:"shimMetrics,omitempty"`
	// Paths are the files that users of the sandbox need.
	Paths Paths `json:"paths"`
}

// Step is one step of the start.
type Step struct {
	Name      string    `json:"name"`
	StartedAt time.Time `json:"startedAt"`
	// DoneAt is zero while the step runs.
	DoneAt time.Time `json:"doneAt,omitzero"`
	// Error is the reason of a failure. Empty if the step succeeded or is still running.
	Error string `json:"error,omitempty"`
}

// ComponentStatus is the state of a component.
type ComponentStatus = process.Status

// Paths are the files of a sandbox.
type Paths struct {
	// Dir contains all files.
	Dir string `json:"dir"`
	// HubKubeconfig and SpokeKubeconfig are an administrator's. SpokeKubeconfig does not exist
	// without a spoke. With [Options].HubOf, HubKubeconfig is the other sandbox's.
	HubKubeconfig   string `json:"hubKubeconfig"`
	SpokeKubeconfig string `json:"spokeKubeconfig"`
	// AgentCA is the authority of the agent's certificate.
	AgentCA string `json:"agentCA"`
	// ClientCertificate and ClientKey identify the spoke's Cluster to the agent, for users and
	// tools. The shim has its own certificate.
	ClientCertificate string `json:"clientCertificate"`
	ClientKey         string `json:"clientKey"`
	// AdminCertificate and AdminKey identify an administrator of the agent.
	AdminCertificate string `json:"adminCertificate"`
	AdminKey         string `json:"adminKey"`
	// ReaderCertificate and ReaderKey identify a reader of everything.
	ReaderCertificate string `json:"readerCertificate"`
	ReaderKey         string `json:"readerKey"`
	// Env is a file for a shell to source. It sets the paths and addresses of this struct as
	// variables.
	Env string `json:"env"`
	// Logs contains one file per component.
	Logs string `json:"logs"`
	// HubAudit is the audit log of the hub's API server, if requested: one audit.k8s.io/v1 Event
	// per line. Events of changes to MachineDeployments include the request.
	HubAudit string `json:"hubAudit"`
}

// clientCertificate is the base name of the files of [Paths].ClientCertificate.
const clientCertificate = "spoke"

func pathsIn(dir string) Paths {
	certs, logs := filepath.Join(dir, "certs"), filepath.Join(dir, "logs")
	return Paths{
		Dir:               dir,
		HubKubeconfig:     filepath.Join(dir, "hub.kubeconfig"),
		SpokeKubeconfig:   filepath.Join(dir, "spoke.kubeconfig"),
		AgentCA:           filepath.Join(certs, "agent-ca.crt"),
		ClientCertificate: filepath.Join(certs, clientCertificate+".crt"),
		ClientKey:         filepath.Join(certs, clientCertificate+".key"),
		AdminCertificate:  filepath.Join(certs, "admin.crt"),
		AdminKey:          filepath.Join(certs, "admin.key"),
		ReaderCertificate: filepath.Join(certs, "reader.crt"),
		ReaderKey:         filepath.Join(certs, "reader.key"),
		Env:               filepath.Join(dir, "env"),
		Logs:              logs,
		HubAudit:          filepath.Join(logs, "hub-audit.log"),
	}
}

// ErrNoState means that a folder contains no sandbox.
var ErrNoState = errors.New("there is no such sandbox")

// ReadState returns the last state written by the sandbox that the options name. The sandbox may
// have been killed since; see [Running].
func ReadState(options Options) (State, error) {
	if err := options.complete(); err != nil {
		return State{}, err
	}
	data, err := os.ReadFile(stateFile(options.StateDir))
	if errors.Is(err, fs.ErrNotExist) {
		return State{}, fmt.Errorf("%w: %s", ErrNoState, options.Name)
	} else if err != nil {
		return State{}, err
	}
	var state State
	if err := json.Unmarshal(data, &state); err != nil {
		return State{}, fmt.Errorf("reading %s: %w", stateFile(options.StateDir), err)
	}
	return state, nil
}

func stateFile(dir string) string { return filepath.Join(dir, "state.json") }

// write replaces the file atomically.
func (s State) write(dir string) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return replaceFile(stateFile(dir), data)
}

func replaceFile(path string, data []byte) error {
	temporary := path + ".tmp"
	if err := os.WriteFile(temporary, data, 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}
