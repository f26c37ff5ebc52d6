package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance/control"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// pair holds the paths of a client certificate and its key.
type pair struct{ cert, key string }

type options struct {
	address, serverName string
	plaintextLoopback   bool
	caFile              string
	caller              pair
	others              map[conformance.Caller]*pair
	cluster             string
	nodeGroups          []string
	control             string
	profiles            []string
	onlyText            string
	only                *regexp.Regexp
	patience            time.Duration
	junit, json         string
}

func newOptions() *options {
	o := &options{patience: 2 * time.Minute, others: map[conformance.Caller]*pair{}}
	for _, caller := range []conformance.Caller{conformance.CallerAutoscaler, conformance.CallerAdmin, conformance.CallerStranger} {
		o.others[caller] = &pair{}
	}
	return o
}

func (o *options) addFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.address, "address", o.address, "Address of the agent: `host:port`, or unix:///path. Required.")
	flags.StringVar(&o.caFile, "ca-file", o.caFile, "PEM `file` with the certificate authorities of the agent's certificate.")
	flags.StringVar(&o.caller.cert, "cert-file", o.caller.cert,
		"PEM `file` with the certificate chain of the caller: the Cluster's own identity, or an identity with at least the role reader.")
	flags.StringVar(&o.caller.key, "key-file", o.caller.key, "PEM `file` with the private key of --cert-file.")
	flags.StringVar(&o.serverName, "server-name", o.serverName, "Name expected in the agent's certificate. Defaults to the host of --address.")
	flags.BoolVar(&o.plaintextLoopback, "plaintext-loopback", o.plaintextLoopback, "Connect without TLS. Only allowed with a loopback address.")
	flags.StringVar(&o.cluster, "cluster", o.cluster, "Cluster to check with, as `namespace/name`. Required, except with --control.")
	flags.StringSliceVar(&o.nodeGroups, "node-group", o.nodeGroups,
		"Node group to claim from, by its `id`; give two. The group must create Machines and Nodes by itself, with room for sixteen of them, and "+
			"nothing else may claim from it. If empty, the behaviours that need it are skipped.")
	for _, caller := range []conformance.Caller{conformance.CallerAutoscaler, conformance.CallerAdmin, conformance.CallerStranger} {
		who := map[conformance.Caller]string{
			conformance.CallerAutoscaler: "an identity with the role autoscaler for this Cluster alone",
			conformance.CallerAdmin:      "an identity with the role admin",
			conformance.CallerStranger:   "the identity of a Cluster that does not exist",
		}[caller]
		flags.StringVar(&o.others[caller].cert, string(caller)+"-cert-file", "",
			"PEM `file` with the certificate chain of "+who+". If empty, the behaviours that need it are skipped.")
		flags.StringVar(&o.others[caller].key, string(caller)+"-key-file", "", "PEM `file` with the private key of --"+string(caller)+"-cert-file.")
	}
	flags.StringVar(&o.control, "control", o.control,
		"`URL` of the test control API of the agent, with which Clusters, node groups, machines and certificates are created. Replaces their flags.")
	flags.StringSliceVar(&o.profiles, "profiles", o.profiles, "Profiles to check: reader, claimer, autoscaler, fault. Defaults to all.")
	flags.StringVar(&o.onlyText, "only", o.onlyText, "Regular expression of the ids of the behaviours to check. Defaults to all.")
	flags.DurationVar(&o.patience, "patience", o.patience,
		"How long to wait for an event that must happen eventually: a machine gets its Node or is removed, a heartbeat arrives.")
	flags.StringVar(&o.junit, "junit", o.junit, "Path of the `file` to which the verdict is written as JUnit XML. If empty, it is not written.")
	flags.StringVar(&o.json, "json", o.json, "Path of the `file` to which the verdict is written as JSON. If empty, it is not written.")
}

// validate returns an error that names the flag of every mistake.
func (o *options) validate() error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if o.address == "" {
		wrong("--address: write the agent's address")
	}
	for _, name := range o.profiles {
		if !slices.Contains(conformance.Profiles(), conformance.Profile(name)) {
			wrong("--profiles: %q is not one of reader, claimer, autoscaler, fault", name)
		}
	}
	var err error
	if o.only, err = regexp.Compile(o.onlyText); err != nil {
		wrong("--only: %v", err)
	}
	if o.patience <= 0 {
		wrong("--patience: %s is not positive", o.patience)
	}
	for caller, files := range o.others {
		if (files.cert == "") != (files.key == "") {
			wrong("--%s-cert-file and --%s-key-file belong together", caller, caller)
		}
	}
	if o.control != "" {
		others := slices.ContainsFunc(slices.Collect(maps.Values(o.others)), func(files *pair) bool { return *files != (pair{}) })
		if o.cluster != "" || len(o.nodeGroups) > 0 || o.caller != (pair{}) || o.caFile != "" || o.plaintextLoopback || others {
			wrong("--control: it makes Clusters, node groups and certificates of its own; drop --cluster, --node-group, --ca-file, " +
				"--plaintext-loopback, and the files of all certificates")
		}
		return errors.Join(errs...)
	}
	if namespace, name, found := strings.Cut(o.cluster, "/"); !found || namespace == "" || name == "" {
		wrong("--cluster: %q is not namespace/name", o.cluster)
	}
	return errors.Join(errs...)
}

func (o *options) selected() []conformance.Profile {
	var selected []conformance.Profile
	for _, name := range o.profiles {
		selected = append(selected, conformance.Profile(name))
	}
	return selected
}

// target connects to the agent. Without an error, the returned function closes the connections.
func (o *options) target(ctx context.Context) (target conformance.Target, done func(), err error) {
	if o.control != "" {
		newEnv, err := control.Dial(ctx, control.Options{Control: o.control, Address: o.address, ServerName: o.serverName, Within: o.patience})
		return conformance.Target{NewEnv: newEnv}, func() {}, err
	}
	var clients []*client.Client
	closeAll := func() {
		for _, c := range clients {
			_ = c.Close() // Every call has returned.
		}
	}
	defer func() {
		if err != nil {
			closeAll()
		}
	}()
	connect := func(files pair) (*client.Client, error) {
		settings := client.Options{Address: o.address, PlaintextLoopback: o.plaintextLoopback, UserAgent: "capi-agent-conformance"}
		if files != (pair{}) || o.caFile != "" {
			settings.TLS = &client.TLS{CertFile: files.cert, KeyFile: files.key, CAFile: o.caFile, ServerName: o.serverName}
		}
		c, err := client.New(settings)
		if err == nil {
			clients = append(clients, c)
		}
		return c, err
	}
	namespace, name, _ := strings.Cut(o.cluster, "/")
	given := conformance.Given{
		Of: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: name}, NodeGroups: o.nodeGroups, Within: o.patience,
	}
	if given.Caller, err = connect(o.caller); err != nil {
		return target, nil, err
	}
	for caller, to := range map[conformance.Caller]**client.Client{
		conformance.CallerAutoscaler: &given.Autoscaler, conformance.CallerAdmin: &given.Admin, conformance.CallerStranger: &given.Stranger,
	} {
		if *o.others[caller] == (pair{}) {
			continue
		}
		if *to, err = connect(*o.others[caller]); err != nil {
			return target, nil, fmt.Errorf("--%s-cert-file: %w", caller, err)
		}
	}
	target, err = given.Target(ctx)
	return target, closeAll, err
}
