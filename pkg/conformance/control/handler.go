package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
)

// maxRequest limits the size of a request, in bytes.
const maxRequest = 1 << 20

// Handler serves the control.
func Handler(c Control) http.Handler {
	mux := http.NewServeMux()
	for operation, do := range map[string]func(context.Context, Request) (Response, error){
		NewEnvironment: func(ctx context.Context, _ Request) (Response, error) {
			environment, err := c.NewEnvironment(ctx)
			return Response{Environment: environment}, err
		},
		EndEnvironment: func(ctx context.Context, r Request) (Response, error) {
			return Response{}, c.EndEnvironment(ctx, r.Cluster)
		},
		CreateNodeGroup: func(ctx context.Context, r Request) (Response, error) {
			if r.Deployment == nil {
				return Response{}, errNoDeployment
			}
			id, err := c.CreateNodeGroup(ctx, r.Cluster, *r.Deployment)
			return Response{NodeGroupID: id}, err
		},
		UpdateNodeGroup: func(ctx context.Context, r Request) (Response, error) {
			if r.Deployment == nil {
				return Response{}, errNoDeployment
			}
			return Response{}, c.UpdateNodeGroup(ctx, r.Cluster, *r.Deployment)
		},
		DeleteNodeGroup: func(ctx context.Context, r Request) (Response, error) {
			return Response{}, c.DeleteNodeGroup(ctx, r.Cluster, r.Name)
		},
		HoldMachines: func(ctx context.Context, r Request) (Response, error) {
			return Response{}, c.HoldMachines(ctx, r.Cluster, r.Name, r.Hold)
		},
		ProvisionMachine: func(ctx context.Context, r Request) (Response, error) {
			return Response{}, c.ProvisionMachine(ctx, r.Cluster, r.ClaimID)
		},
		JoinNode: func(ctx context.Context, r Request) (Response, error) {
			return Response{}, c.JoinNode(ctx, r.Cluster, r.Machine)
		},
		LoseMachine: func(ctx context.Context, r Request) (Response, error) {
			return Response{}, c.LoseMachine(ctx, r.Cluster, r.Machine)
		},
		ExpireTokens: func(ctx context.Context, r Request) (Response, error) {
			return Response{}, c.ExpireTokens(ctx, r.Cluster)
		},
	} {
		mux.HandleFunc("POST /v1/"+operation, func(w http.ResponseWriter, r *http.Request) {
			request, err := read(w, r)
			if err != nil {
				answer(w, http.StatusBadRequest, Response{Error: err.Error()})
				return
			}
			response, err := do(r.Context(), request)
			if err != nil {
				answer(w, http.StatusConflict, Response{Error: err.Error()})
				return
			}
			answer(w, http.StatusOK, response)
		})
	}
	return mux
}

var errNoDeployment = errors.New("deployment: is missing")

func read(w http.ResponseWriter, r *http.Request) (Request, error) {
	// Browsers let pages send requests with other content types to loopback without a preflight.
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		return Request{}, errors.New("the Content-Type must be application/json")
	}
	var request Request
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&request); err != nil {
		return Request{}, fmt.Errorf("reading the request: %w", err)
	}
	return request, nil
}

func answer(w http.ResponseWriter, code int, response Response) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	if err := json.NewEncoder(w).Encode(response); err != nil {
		return // The caller detects a partial response.
	}
}
